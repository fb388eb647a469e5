def test_inspect_prints_the_regions(call, tuned):
    code, out, err = call("inspect", tuned, "--include-all-regions", "--verbose")
    assert (code, err) == (0, "")
    assert "8/8 nodes (100.0%)" in out
    assert "  - third" in out
