"""Scripts with named keys and arguments, and the scripts of all stores."""

import importlib
import pkgutil
import re

import pytest
import redis.asyncio

import toolcrew.store
from tests.conftest import RedisProcess
from toolcrew.store.scripts import Script
from toolcrew.store.slots import load_script

SHOW = Script("return {list, text, #more, more[1], more[2]}", keys=("list",), args=("text", "more..."))
VALUES = {"list": "key", "text": "first", "more": ["second", 3]}
SHOWN = [b"key", b"first", 2, b"second", b"3"]


def find_scripts() -> dict[str, Script]:
    """Return every script of the store by its module and name."""
    modules = [
        importlib.import_module(f"toolcrew.store.{info.name}") for info in pkgutil.iter_modules(toolcrew.store.__path__)
    ]
    found = {f"{module.__name__}.{name}": value for module in modules for name, value in vars(module).items()}
    return {name: value for name, value in found.items() if isinstance(value, Script)} | {"slots": load_script()}


async def test_names_are_variables_of_the_script(redis_server: RedisProcess) -> None:
    with redis_server.client() as client:
        assert SHOW.run_blocking(client, **VALUES) == SHOWN
        pipe = client.pipeline(transaction=False)
        SHOW.add_to(pipe, **VALUES)
        assert pipe.execute() == [SHOWN]
        client.script_flush()
    async with redis.asyncio.Redis.from_url(redis_server.url) as client:
        for _ in range(2):
            assert await SHOW.run(client, **VALUES) == SHOWN


@pytest.mark.parametrize("values", [{"list": "key", "text": "first"}, {**VALUES, "other": 1}, {**VALUES, "lists": 1}])
def test_a_wrong_name_is_an_error(values: dict[str, str]) -> None:
    with pytest.raises((TypeError, KeyError)):
        SHOW.arrange(values)


@pytest.mark.parametrize(("name", "script"), find_scripts().items(), ids=find_scripts().keys())
def test_a_script_uses_each_of_its_names_and_no_positions(name: str, script: Script) -> None:
    names = [name.removesuffix("...") for name in (*script.keys, *script.args)]
    body = re.sub(
        r"^(local \w+ = (KEYS|ARGV)\[\d+\]|for i = \d+, #(KEYS|ARGV) .*end|local \w+ = {})\n",
        "",
        script.source,
        flags=re.M,
    )
    assert not re.findall(r"\b(?:KEYS|ARGV)\b", body)
    # A local variable of the script with the same name would hide the value.
    assert [name for name in names if re.search(rf"^local (function )?([\w, ]+, )?{name}\b", body, re.M)] == []
    assert [name for name in names if not re.search(rf"\b{name}\b", body)] == []
