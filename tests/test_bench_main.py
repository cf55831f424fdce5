"""`python -m bench`: commands by name, help that leads to them, and an interrupt."""

import pytest

from bench import __main__ as bench
from bench.limits import command


def test_an_interrupt_is_one_line(monkeypatch, capsys):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run", interrupted)
    assert bench.main(["limits"]) == 130
    assert capsys.readouterr().err == "bench limits: interrupted\n"


def test_a_wrong_option_points_to_its_commands_help(capsys):
    with pytest.raises(SystemExit) as caught:
        bench.main(["limits", "--ranks", "3"])
    assert caught.value.code == 2
    assert "python -m bench limits --help" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), ([], 2), (["limit"], 2)])
def test_commands_are_listed(arguments, code, capsys):
    with pytest.raises(SystemExit) as caught:
        bench.main(arguments)
    assert caught.value.code == code
    shown = capsys.readouterr()
    assert all(name in shown.out + shown.err for name in bench.COMMANDS)


def test_a_command_gets_its_options(capsys):
    assert bench.main(["limits", "--shape", "olmoe", "--table", "shapes"]) == 0
    assert "olmoe" in capsys.readouterr().out
