"""Records of files: what a sandbox or a client may have made invalid."""

import pytest
from pydantic import ValidationError

from toolcrew.contract.file_views import FileEntry, NewFolder

ENTRY = {
    "name": "a", "path": "/a", "type": "file", "size": 1, "mode": 420, "owner": "a", "group": "b", "uid": 1, "gid": 1,
}  # fmt: skip


@pytest.mark.parametrize("seconds", [-1e300, -1.5, 0, 1.5, 1e300])
def test_an_entry_of_any_time_can_be_sent_and_read(seconds: float) -> None:
    text = FileEntry.model_validate({**ENTRY, "modified_at": seconds}).model_dump_json()
    assert FileEntry.model_validate_json(text).size == 1


@pytest.mark.parametrize("path", ["", "a\0b", "é" * 2049])
def test_a_path_that_no_file_can_have_is_refused(path: str) -> None:
    with pytest.raises(ValidationError):
        NewFolder(path=path)
