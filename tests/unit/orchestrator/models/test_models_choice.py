"""The model that the settings select, and the settings that reach it."""

import pytest

from tests.support.models.model_endpoint import answer, read, serving
from toolcrew.contract.errors import ConfigError
from toolcrew.contract.settings import OrchestratorSettings, load_settings
from toolcrew.orchestrator.models.choice import choose_model, find_shipped
from toolcrew.orchestrator.models.openai import OpenAIModel
from toolcrew.orchestrator.models.scripted import ALL_CAPABILITIES


async def test_model_uses_the_streaming_and_retry_settings() -> None:
    whole = answer(200, {"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]})
    replies = [answer(503, {}, retry_after="0"), answer(503, {}, retry_after="0"), whole]
    async with serving(replies) as server:
        settings = OrchestratorSettings(openai_base_url=server.url, model="m", model_streaming=False, model_retries=2)
        async with choose_model(settings) as chosen:
            assert isinstance(chosen.model, OpenAIModel)
            assert chosen.capabilities is None
            assert len(await read(chosen.model)) == 2
        assert [body["stream"] for body in server.bodies] == [False] * 3


async def test_scripted_model_has_all_capabilities_without_a_probe() -> None:
    async with choose_model(OrchestratorSettings(), "scripted") as chosen:
        assert chosen.capabilities == ALL_CAPABILITIES


async def test_endpoint_without_a_model_names_the_missing_variable() -> None:
    with pytest.raises(ConfigError, match="TOOLCREW_MODEL"):
        async with choose_model(OrchestratorSettings(openai_base_url="http://127.0.0.1:9/v1", model=None)):
            raise AssertionError("a model was chosen")


@pytest.mark.parametrize(
    ("name", "value"),
    [("MODEL_RETRIES", "-1"), ("MODEL_CONTEXT_TOKENS", "0"), ("MODEL_STREAMING", "perhaps"), ("DIALECT", "yaml")],
)
def test_invalid_setting_is_named_in_the_error(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"TOOLCREW_{name}", value)
    with pytest.raises(ConfigError, match=f"TOOLCREW_{name}"):
        load_settings()


@pytest.mark.parametrize("name", ["local", "scripted"])
async def test_shipped_model_name_is_refused_while_a_server_url_is_set(name: str) -> None:
    for settings, expected in (
        (OrchestratorSettings(openai_base_url="http://127.0.0.1:9/v1", model=name), None),
        (OrchestratorSettings(openai_base_url="http://127.0.0.1:9/v1"), name),
    ):
        with pytest.raises(
            ConfigError, match=f"the model '{name}' is shipped with toolcrew, but OPENAI_BASE_URL is set"
        ):
            async with choose_model(settings, expected):
                raise AssertionError("a model was chosen")


def test_shipped_model_is_found_by_name_and_local_is_the_default() -> None:
    nothing = OrchestratorSettings(openai_base_url=None, openai_api_key=None, model=None)
    with_key = OrchestratorSettings.model_validate({"OPENAI_API_KEY": "k"})
    names = (None, "local", "scripted", "gpt")
    assert [find_shipped(nothing, name) for name in names] == ["local", "local", "scripted", None]
    assert [find_shipped(with_key, name) for name in names] == [None, "local", "scripted", None]
