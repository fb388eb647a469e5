"""Completion by click: what a shell loads, and what it is answered."""


def test_a_shell_gets_the_script_of_click(monkeypatch, call):
    monkeypatch.setenv("_QDQTUNE_COMPLETE", "bash_source")
    code, script, _ = call()
    assert code == 0
    assert "_QDQTUNE_COMPLETE=bash_complete" in script


def test_a_shell_that_asks_is_answered(monkeypatch, call):
    for name, value in {"COMP_WORDS": "qdqtune tune --dry", "COMP_CWORD": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("_QDQTUNE_COMPLETE", "bash_complete")
    assert call() == (0, "plain,--dry-run\n", "")
