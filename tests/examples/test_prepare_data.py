"""examples/prepare_data.py and the checks of .bin/.idx files: real files, real tokenizer."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tokenizers")
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "prepare_data.py"
TEXTS = {
    "a.txt": "Grüße, 世界! tabs\tand\r\nlines\n" * 40,
    "b.txt": "def f(x):\n    return x\n" * 60,
}


def prepare(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, args)], capture_output=True, text=True, timeout=120
    )


def only_error_line(done: subprocess.CompletedProcess[str]) -> str:
    """The error message of a run that must have failed as a user's mistake."""
    assert done.returncode == 2, done
    assert "Traceback" not in done.stderr
    (line,) = [x for x in done.stderr.splitlines() if x.startswith("error: ")]
    return line


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepare")
    (folder / "in").mkdir()
    for name, text in TEXTS.items():
        (folder / "in" / name).write_bytes(text.encode())
    (folder / "in" / "binary.txt").write_bytes(b"\xff\xfe\x00")
    done = prepare("--input", folder / "in", "--output", folder / "out", "--vocab-size", 300)
    assert done.returncode == 0, done.stderr
    assert f"left out 1 file not readable as UTF-8 text: {folder}/in/binary.txt" in done.stderr
    return folder / "out"


def test_megatron_reads_back_the_text(prepared: Path) -> None:
    pytest.importorskip("megatron.core")
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from tokenizers import Tokenizer

    dataset = IndexedDataset(str(prepared / "text"))
    tokenizer = Tokenizer.from_file(str(prepared / "tokenizer.json"))
    assert len(dataset) == 2
    for ids, text in zip(dataset, TEXTS.values(), strict=True):
        assert ids[-1] == tokenizer.token_to_id("<|endoftext|>")
        assert tokenizer.decode(ids[:-1].tolist(), skip_special_tokens=False) == text


def test_data_json_states_the_entropy_of_the_tokens(prepared: Path) -> None:
    facts = json.loads((prepared / "data.json").read_text())
    tokens = np.fromfile(prepared / "text.bin", dtype=np.uint16)
    assert facts["tokens"] == len(tokens) and facts["documents"] == 2
    share = np.unique(tokens, return_counts=True)[1] / len(tokens)
    assert facts["unigram_entropy_nats"] == pytest.approx(-(share * np.log(share)).sum(), abs=1e-5)


def test_nothing_is_left_behind_beside_the_output(prepared: Path) -> None:
    assert sorted(os.listdir(prepared)) == ["data.json", "text.bin", "text.idx", "tokenizer.json"]
    assert sorted(os.listdir(prepared.parent)) == ["in", "out"]


def test_what_is_left_out_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name, content in (
        ("a.txt", b"x y\n" * 2**18),
        ("b.txt", b"y z\n" * 2**18),
        ("late.txt", b"z"),
    ):
        (folder / name).write_bytes(content)
    for number in range(5):
        (folder / f"a{number}.txt").write_bytes(b"\xff")
    (folder / "aa.txt").write_bytes(b" \n")
    done = prepare("--input", folder, "--output", tmp_path / "out", "--max-mib", 2)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("left out")]
    assert lines == [
        f"left out 5 files not readable as UTF-8 text: {folder}/a0.txt, {folder}/a1.txt, "
        f"{folder}/a2.txt, ...",
        f"left out 1 file without text: {folder}/aa.txt",
        f"left out 1 file not read after 2.0 MiB (--max-mib): {folder}/late.txt",
    ]
    size = json.loads((tmp_path / "out" / "data.json").read_text())["vocab_size"]
    assert size < 4096
    assert f"the vocabulary has {size} tokens, not 4096 (--vocab-size)" in done.stderr


def test_bad_input_is_one_clear_line(prepared: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    out = tmp_path / "out"
    cases = [
        (["--input", tmp_path / "none", "--output", out], "is not a folder"),
        (["--input", tmp_path / "empty", "--output", out], "no file below"),
        (
            ["--input", prepared.parent / "in", "--output", out, "--vocab-size", 10],
            "needs at least 258",
        ),
        (["--input", prepared.parent / "in", "--output", out, "--vocab-size", 10**12], "no model"),
        (["--input", prepared.parent / "in", "--output", prepared], "--overwrite replaces it"),
    ]
    for args, message in cases:
        assert message in only_error_line(prepare(*args))
    assert not out.exists()


DEFAULT_INPUT = """
import json, prepare_data
args = prepare_data.arguments([])
files = prepare_data.find_files(args.input, args.patterns, args.exclude)
print(json.dumps([str(args.input), [str(f.relative_to(args.input)) for f in files],
                  sum(f.stat().st_size for f in files), args.max_mib]))
"""


def test_the_default_input_is_the_standard_library() -> None:
    """What `make pretrain` reads: real text of some megabytes, on any machine."""
    done = subprocess.run(
        [sys.executable, "-c", DEFAULT_INPUT],
        cwd=SCRIPT.parent, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    folder, files, size, most = json.loads(done.stdout)
    assert folder == str(Path(os.__file__).parent)
    assert {"os.py", "json/decoder.py"} <= set(files)
    assert sum(name.endswith(".py") for name in files) > 300
    assert 4 < size / 2**20 < most
    assert not {"site-packages", "test", "tests"} & {part for f in files for part in Path(f).parts}


def test_no_text_is_ever_replaced(tmp_path: Path) -> None:
    source, other = tmp_path / "texts" / "in", tmp_path / "other"
    for folder in (source, other):
        folder.mkdir(parents=True)
        (folder / "a.txt").write_text(TEXTS["b.txt"])
    for output, message in (
        (source, "holds --input"),
        (source.parent, "holds --input"),
        (other, "has no data.json in it"),
    ):
        done = prepare("--input", source, "--output", output, "--overwrite")
        assert message in only_error_line(done)
    assert (source / "a.txt").is_file() and (other / "a.txt").is_file()


def test_special_tokens_in_a_text_are_text(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    (tmp_path / "in").mkdir()
    text = TEXTS["b.txt"] + "<|endoftext|> is a token, <|padding|> too\n"
    (tmp_path / "in" / "a.txt").write_text(text)
    os.mkfifo(tmp_path / "in" / "pipe.txt")  # nobody writes to it
    output = tmp_path / "out"
    done = prepare("--input", tmp_path / "in", "--output", output, "--vocab-size", 300)
    assert done.returncode == 0, done.stderr
    tokens = np.fromfile(output / "text.bin", dtype=np.uint16).tolist()
    tokenizer = Tokenizer.from_file(str(output / "tokenizer.json"))
    special = [tokenizer.token_to_id(t) for t in ("<|endoftext|>", "<|padding|>")]
    assert [t for t in tokens if t in special] == [special[0]] and tokens[-1] == special[0]
    assert tokenizer.decode(tokens[:-1]) == text
