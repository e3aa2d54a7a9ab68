"""The server's parts by themselves: text that comes in pieces, limits, addresses, settings, runs."""

import subprocess
import sys

import pytest
from tiny_runs import write_tiny_model
from tiny_tokenizer import make_tokenizer

from paceline.cli.app import main
from paceline.config import ConfigError
from paceline.data.turns import TurnError, TurnRenderer
from paceline.serve.errors import ApiError
from paceline.serve.guard import RateLimiter, is_loopback
from paceline.serve.schemas import parse_completion
from paceline.serve.server import ServeSettings, load_served
from paceline.serve.sessions import Session, SessionStore, Turn
from paceline.serve.text import TextStream
from paceline.telemetry.ledger import Ledger


def ids(text):
    return make_tokenizer()(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("text", ["hello lo", "Grüße, 世界 🎉!", "héllo"])
def test_pieces_of_text_add_up_and_no_half_character_is_shown(text):
    stream = TextStream(make_tokenizer())
    pieces = [stream.add([token]) for token in ids(text)]
    assert "".join(pieces) + stream.finish() == text
    assert "\ufffd" not in "".join(pieces)


def test_what_may_become_a_stop_text_is_held_back():
    stream = TextStream(make_tokenizer(), ["STOP", "\n\n"])
    shown = [stream.add([token]) for token in ids("a ST b STO")]
    assert "".join(shown) == "a ST b " and not stream.is_stopped
    assert stream.add(ids("P and more")) == "" and stream.is_stopped
    assert stream.add(ids("more")) == stream.finish() == ""
    open_end = TextStream(make_tokenizer(), ["STOP"])
    assert open_end.add(ids("x STO")) + open_end.finish() == "x STO"


def test_a_text_cut_inside_a_character_shows_that_it_is():
    stream = TextStream(make_tokenizer())
    assert stream.add(ids("é")[:1]) == "" and stream.finish() == "\ufffd"


def test_requests_are_limited_evenly_and_each_client_by_itself():
    now = [0.0]
    limiter = RateLimiter(60, clock=lambda: now[0])
    for _ in range(6):
        limiter.take("a")
    with pytest.raises(ApiError) as raised:
        limiter.take("a")
    assert (raised.value.status, raised.value.retry_after_s) == (429, 1)
    limiter.take("b")
    now[0] = 1.0
    limiter.take("a")


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("example.org", False)],
)
def test_loopback_addresses_are_known(host, expected):
    assert is_loopback(host) is expected


def test_an_address_that_others_reach_needs_a_key(capsys, monkeypatch):
    monkeypatch.delenv("PACELINE_API_KEY", raising=False)
    assert main(["serve", "nowhere", "--host", "0.0.0.0"]) == 2
    assert "--host" in capsys.readouterr().err


def test_a_source_without_a_model_and_a_run_without_an_export_are_refused(tmp_path, capsys):
    assert main(["serve", str(tmp_path), "--port", "0"]) == 2
    (tmp_path / "config.yaml").write_text("model: {path: m}\ntask: {path: p.jsonl}\n")
    with pytest.raises(ConfigError, match="exported no weights"):
        load_served(ServeSettings(tmp_path), Ledger())


def test_a_model_and_a_runs_export_are_served_under_their_names(tmp_path):
    write_tiny_model(tmp_path / "run" / "export")
    (tmp_path / "run" / "config.yaml").write_text(
        "run: {name: mine}\nmodel: {path: m}\ntask: {path: p.jsonl}\nrollout: {temperature: 0.5}\n"
    )
    _, run = load_served(ServeSettings(tmp_path / "run"), Ledger())
    assert (run.name, run.temperature, run.max_context) == ("mine", 0.5, 128)
    _, model = load_served(ServeSettings(tmp_path / "run" / "export"), Ledger())
    assert (model.name, model.temperature) == ("export", 1.0)
    assert model.stop_token_ids == {2}


def test_the_server_is_not_imported_by_the_other_commands():
    code = "import paceline.cli.app, sys; sys.exit('starlette' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def turn(text, **rest):
    tokens = tuple(ids(text))
    return Turn(tokens, (-0.5,) * len(tokens), (0,) * len(tokens), "stop", text, **rest)


def test_sampled_tokens_are_never_made_again_from_their_text():
    """Case 'Re-tokenisation': "hel" + "lo" were sampled, "hello" is what the tokenizer would write."""
    tokenizer = make_tokenizer()
    hel, lo, end = ids("hel")[0], ids("lo")[0], tokenizer.eos_token_id
    assert len(ids("hello")) == 1
    session = Session("s", TurnRenderer(tokenizer))
    question = [{"role": "user", "content": "say it"}]
    first = session.prompt_ids(question)
    session.record(first, Turn((hel, lo, end), (-1.0, -2.0, -3.0), (4, 4, 4), "stop", "hello"), question)
    followed = [*question, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "again"}]
    second = session.prompt_ids(followed)
    inserted = tuple(ids("<s>user\nagain</s><s>assistant\n"))
    assert second == (*first, hel, lo, end, *inserted)
    session.record(second, Turn((lo,), (-0.1,), (5,), "length", "lo"), followed)
    ((prompt, sample),) = session.samples()
    assert prompt == first
    assert sample.token_ids == (hel, lo, end, *inserted, lo)
    assert sample.loss_mask == (1, 1, 1, *[0] * len(inserted), 1)
    assert sample.logprobs == (-1.0, -2.0, -3.0, *[0.0] * len(inserted), -0.1)
    assert sample.token_versions[0] == 4 and sample.token_versions[-1] == 5 and sample.weight_version == 4
    assert sample.finish_reason == "length"


def test_an_end_token_that_was_not_sampled_is_inserted():
    renderer = TurnRenderer(make_tokenizer())
    cut = renderer.continuation(ids("lo"), [{"role": "user", "content": "x"}])
    ended = renderer.continuation(
        [*ids("lo"), make_tokenizer().eos_token_id], [{"role": "user", "content": "x"}]
    )
    assert cut == (make_tokenizer().eos_token_id, *ended)


def test_a_history_that_was_changed_begins_a_branch_of_its_own():
    session = Session("s", TurnRenderer(make_tokenizer()))
    question = [{"role": "user", "content": "q"}]
    session.record(session.prompt_ids(question), turn("lo"), question)
    edited = [*question, {"role": "assistant", "content": "not lo"}, {"role": "user", "content": "q2"}]
    session.record(session.prompt_ids(edited), turn("he"), edited)
    assert [sample.sample_index for _, sample in session.samples()] == [0, 1]
    assert all(all(sample.loss_mask) for _, sample in session.samples())


def test_turns_that_come_as_tokens_are_merged_by_prefix():
    session = Session("s", TurnRenderer(make_tokenizer()))
    session.record((1, 2), turn("he"))
    session.record((1, 2, *ids("he"), 9), turn("lo"))
    session.record((1, 3), turn("lo"))
    (_, first), (_, second) = session.samples()
    assert first.token_ids == (*ids("he"), 9, *ids("lo")) and second.token_ids == tuple(ids("lo"))


def test_the_oldest_session_is_forgotten_when_there_are_too_many():
    store = SessionStore(TurnRenderer(make_tokenizer()), capacity=2)
    for name in "abc":
        store.open(name)
    assert store.find("a") is None and len(store) == 2 and store.num_forgotten == 1


def test_a_template_that_hides_earlier_answers_cannot_continue():
    hides = "{% for m in messages %}{% if m.role != 'assistant' %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(TurnError, match="as it is"):
        TurnRenderer(make_tokenizer(hides)).continuation([5], [{"role": "user", "content": "x"}])
    with pytest.raises(TurnError, match="no chat template"):
        TurnRenderer(make_tokenizer(None)).opening([{"role": "user", "content": "x"}])


def test_a_body_that_is_no_object_is_refused_as_that() -> None:
    with pytest.raises(ApiError) as caught:
        parse_completion([1, 2])
    assert (caught.value.message, caught.value.param) == ("The body must be a JSON object.", None)
