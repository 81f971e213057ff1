"""Which names are secrets, and settings of any shape without their values."""

import pytest
from jsonargparse import Namespace

from lightrl.checks.secret_settings import is_secret, without_secrets


@pytest.mark.parametrize(
    "name",
    [
        *("token", "api_key", "api_keys", "apiKey", "APIKey", "api_key_2", "key", "openai_key", "private_key"),
        *("password", "passwd", "secret", "secrets", "credentials", "github_token", "client_secret", "accessToken"),
        *("GITHUB_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "SSH_AUTH_SOCK", "HF_TOKENS"),
        *("Authorization", "headers.Authorization", "Proxy-Authorization", "x-api-key", "X-Auth-Token", "Cookie"),
        "trainer.engine.token",
        *("hub_token", "refreshToken", "session_token", "server_token", "signing_key", "encryption_key", "wandb_key"),
        *("jwt", "db_pwd", "MYSQL_PWD", "bearer", "sentry_dsn", "--api-key"),
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        *("max_new_tokens", "model.sampling.max_new_tokens", "num_tokens", "microbatch_tokens", "stop_token_ids"),
        *("tokenizer", "api_key_variable", "token_file", "eos_token", "seconds_per_token", "prompt_key", "keyword"),
        *("chosen_key", "rejected_key", "question_key", "response_key", "solution_key", "video_key", "id_key"),
        *("reward_fn_key", "eot_token", "think_token", "boi_token", "user_token", "PWD"),
        *("author", "", "by_path.x", "token.value", "MAX_TOKENS", "NUM_NEW_TOKENS", "TOKENIZERS_PARALLELISM", "MONKEY"),
    ],
)
def test_names_of_other_settings(name: str) -> None:
    assert not is_secret(name)


def test_a_secret_is_left_out_at_any_depth_and_the_original_keeps_it() -> None:
    engine = Namespace(server_args={"api_key": "s3cret", "tp": 2}, token="s3cret", urls=("a", "b"))
    reward = [{"path": "a.b", "arguments": {"token": "s3cret", "max_new_tokens": 5}}, "a.c"]
    settings = Namespace(trainer=Namespace(engine=engine), model=Namespace(reward=reward))
    assert without_secrets(settings) == Namespace(
        trainer=Namespace(engine=Namespace(server_args={"tp": 2}, urls=("a", "b"))),
        model=Namespace(reward=[{"path": "a.b", "arguments": {"max_new_tokens": 5}}, "a.c"]),
    )
    assert (engine.token, reward[0]["arguments"]["token"]) == ("s3cret", "s3cret")


def test_all_below_a_secret_is_left_out_or_replaced_and_placeholders_and_numbers_stay() -> None:
    public = {"OPENAI_API_KEY": "{api_key}", "SERPER_API_KEY": "{env:SERPER}", "key": True, "token": 3}
    public["password"] = None
    secret = {"HF_TOKEN": "x{api_key}", "credentials": {"user": "me", "pins": ["1"]}, "api_keys": ["a", "b"]}
    assert without_secrets(public | secret) == public
    assert without_secrets([public | secret], "-") == [public | dict.fromkeys(secret, "-")]


def test_a_key_or_token_of_an_unknown_owner_goes_by_its_value() -> None:
    public = {"eot_token": "<|reserved_special_token_0|>", "chosen_key": "chosen", "video_key": "data.videos"}
    assert without_secrets(public | {"acme_key": "ak-0123456789abcdef"}) == public


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("https://me:pw@host:8000/v1", "https://host:8000/v1"),
        ("https://ghp_0123@github.com/me/x", "https://github.com/me/x"),
        ("postgresql://me:p%40w@host/db", "postgresql://host/db"),
        ("http://proxy http://:pw@other", "http://proxy http://other"),
        ("hf://name@main", "hf://name@main"),
        ("http://host:80/a@b?c=d@e", "http://host:80/a@b?c=d@e"),
        ("https://me:{api_key}@host", "https://me:{api_key}@host"),
    ],
)
def test_a_url_loses_its_user_and_password(text: str, public: str) -> None:
    assert without_secrets({"urls": [text], "url": text}) == {"urls": [public], "url": public}


def test_headers_and_arguments_in_a_list_are_left_out_or_replaced() -> None:
    items = ["--tp", "2", "--api-key", "sk-1", "--port=1", "--api-key=sk-1", "Authorization: Bearer sk-1", "Accept: x"]
    assert without_secrets(items) == ["--tp", "2", "--port=1", "Accept: x"]
    assert without_secrets(items, "-") == ["--tp", "2", "-", "-", "--port=1", "-", "-", "Accept: x"]
    others = ["--api-key", 3, "token", "Authorization: Bearer {api_key}", "--eot-token", "<|eot|>", "--token"]
    assert without_secrets(others) == others
