"""What the shell reader makes of a script, without running it."""

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.adapters.shell import ShellSyntaxError, read_script

PIECES = (
    "if true; then",
    "[ -n $X ]",
    "fi",
    "else",
    "for x in a b; do",
    "done",
    "case $X in",
    "a|b) y=1 ;;",
    "esac",
    "f() {",
    "}",
    "f",
    "a=(1 $x)",
    '"${a[@]}"',
    "$((x + ",
    "))",
    "${x:-",
    "}",
    "run",
    "&&",
    "||",
    "\n",
    "export X=2",
    "<<EOF",
    "EOF",
)


def arguments(script: str, **environment: str) -> list[tuple[str, ...]]:
    return [command.arguments for command in read_script(script, environment).commands]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("run a=1 'b c' \"d e\" f\\ g", ("run", "a=1", "b c", "d e", "f g")),
        ("x=5; run $x ${x} \"$x\" '$x'", ("run", "5", "5", "5", "$x")),
        ("run \\\n  a \\\n  b", ("run", "a", "b")),
        ("run a # not this\n", ("run", "a")),
        ("x='a b'; run $x \"$x\"", ("run", "a", "b", "a b")),
        ("a=(one 'two three' $((1+1))); run \"${a[@]}\"", ("run", "one", "two three", "2")),
        ('a=(1); a+=(2 3); run "${a[@]}" ${a[1]} ${#a[@]}', ("run", "1", "2", "3", "2", "3")),
        ('a=(); run "${a[@]}" end', ("run", "end")),
        ("run ${unset:-default} ${unset-d2} ${also:=set} $also", ("run", "default", "d2", "set", "set")),
        (
            "p=/a/b/c.txt; run ${p##*/} ${p%.txt} ${p/b/x} ${p#/a/}",
            ("run", "c.txt", "/a/b/c", "/a/x/c.txt", "b/c.txt"),
        ),
        ("n=4; run $((n * 2 + 7 / 2)) $(( (n + 1) << 2 )) $((-7 / 2))", ("run", "11", "20", "-3")),
        ('run \'["console","wandb"]\' "[\'$HOME/a\']"', ("run", '["console","wandb"]', "['${HOME}/a']")),
        ("run $(basename /m/Qwen3-8B) $(dirname /m/q) $(echo a b)", ("run", "Qwen3-8B", "/m", "a", "b")),
        ("run 2>&1 a > log.txt b", ("run", "a", "b")),
        ("run a <<EOF\nnot 'this\nEOF\n", ("run", "a")),
        ("if [ 3 -gt 2 ]; then x=yes; else x=no; fi; run $x", ("run", "yes")),
        ("if [[ abc == a* && -n x ]]; then x=yes; fi; run $x", ("run", "yes")),
        ("case npu in gpu) x=1 ;; n*|y) x=2 ;; esac; run $x", ("run", "2")),
        ("f() { local y=$1; run $y $#; }; f 7 8", ("run", "7", "2")),
        ("export A=1; B=2 run", ("run",)),
        ("true && x=1 || x=2; run $x", ("run", "1")),
        ("run ${a.b.c} '${oc.env:HOME}'", ("run", "${a.b.c}", "${oc.env:HOME}")),
        ("x=a; y=x; run ${!y} ${x^^}", ("run", "a", "A")),
        ("run --a='{\"k\": [1, 2]}'", ("run", '--a={"k": [1, 2]}')),
        ("r='x # y'; run \"$r\"#z", ("run", "x # y#z")),
    ],
)
def test_a_command_has_the_arguments_a_shell_would_give_it(script: str, expected: tuple[str, ...]) -> None:
    assert arguments(script) == [expected]


def test_what_is_unknown_stays_visible_and_is_listed() -> None:
    result = read_script('run $MODEL "$(nvidia-smi -L)" $((N * 2))')
    assert result.commands[0].arguments == ("run", "${MODEL}", "$(nvidia-smi)", "$((N*2))")
    assert result.unknown == ("MODEL", "N")


def test_a_variable_given_from_outside_is_known() -> None:
    assert arguments("run $MODEL", MODEL="m") == [("run", "m")]


def test_environment_is_what_was_exported_before_and_set_for_the_command() -> None:
    (command,) = read_script("A=1\nexport B=2\nC=3 run").commands
    assert command.environment == {"B": "2", "C": "3"}


def test_a_loop_over_known_words_is_unrolled() -> None:
    assert arguments("for x in a b; do run $x; done") == [("run", "a"), ("run", "b")]


def test_an_undecidable_condition_takes_the_else_branch_and_says_so() -> None:
    result = read_script("if nvidia-smi; then x=gpu; else x=cpu; fi; run $x")
    assert result.commands[-1].arguments == ("run", "cpu")
    assert "line 1" in result.notes[0]


def test_a_usage_check_on_unknown_arguments_does_not_end_the_script() -> None:
    assert arguments('if [ "$#" -lt 2 ]; then echo usage; exit 1; fi\nrun "$@"') == [("run",)]


def test_exit_ends_the_script() -> None:
    assert arguments("run a\nexit 0\nrun b") == [("run", "a")]


def test_commands_know_their_line() -> None:
    commands = read_script("#!/bin/bash\n\nx=1 # c\nrun \\\n a\n\nlast").commands
    assert [command.line for command in commands] == [4, 7]


@pytest.mark.parametrize(
    "script", ["run 'a", 'run "a', "if true; then x", "run $(a", "a=(1 2", "fi", "run ${a"]
)
def test_text_that_is_no_script_is_refused(script: str) -> None:
    with pytest.raises(ShellSyntaxError):
        read_script(script)


@pytest.mark.parametrize("script", ["x=$x$x; f() { f; }; f; run", "a=b; b=a; run $((a))"])
def test_self_reference_ends(script: str) -> None:
    assert arguments(script)[-1][0] == "run"


@given(st.text(alphabet=" \n\t\r'\"\\$(){}[]|&;<>#=`!*?~+-:/%@^,.ab1_", max_size=60))
@settings(max_examples=150)
def test_any_text_is_read_or_refused(script: str) -> None:
    with suppress(ShellSyntaxError):
        read_script(script)


@given(st.lists(st.sampled_from(PIECES), max_size=12))
@settings(max_examples=150)
def test_any_pieces_of_scripts_are_read_or_refused(pieces: list[str]) -> None:
    try:
        result = read_script(" ".join(pieces))
    except ShellSyntaxError:
        return
    assert all(command.arguments for command in result.commands)


def test_windows_line_ends_are_read_and_said() -> None:
    result = read_script("x=1\r\nrun $x \\\r\n  a\r\n")
    assert result.commands[0].arguments == ("run", "1", "a")
    assert "carriage return" in result.notes[0]


def test_a_script_that_calls_itself_without_end_is_followed_only_so_far() -> None:
    result = read_script("f() { f; f; }\nf\n")
    assert "not followed further" in result.notes[-1]
