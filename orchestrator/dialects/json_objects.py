"""Parser of the JSON objects that a model wrote."""

import json
from typing import Any

from toolcrew.contract.schema import MAX_VALUES
from toolcrew.contract.strict_json import InvalidJson, parse_object
from toolcrew.orchestrator.dialects.surrogates import join_surrogates


def parse_json_object(raw: str, subject: str) -> dict[str, Any]:
    """Parse `raw`, which must be one JSON object. Lone surrogates are replaced. Models write line breaks and tabs into
    texts without an escape, so control characters are accepted there.

    Raises ValueError with a sentence about `subject` ("the arguments").
    """
    try:
        value = parse_object(raw, MAX_VALUES, has_raw_controls=True)
    except InvalidJson as error:
        be = "are" if subject.endswith("s") else "is"
        raise ValueError(f"{subject} {be} not valid JSON of one object: {join_surrogates(error.message)}") from None
    if "\\ud" in raw.lower():
        # Escapes of lone surrogates parse, but the strings could not be encoded again.
        value = json.loads(join_surrogates(json.dumps(value, ensure_ascii=False)))
    return value
