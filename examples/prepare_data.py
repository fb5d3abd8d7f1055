"""Turns a folder of text into the .bin/.idx files that Megatron reads, with a tokenizer trained
on that text.

    python examples/prepare_data.py                                    # Python's standard library
    python examples/prepare_data.py --input ~/books --output runs/data/books --vocab-size 16384

Writes OUTPUT/text.bin, text.idx, tokenizer.json (byte-level BPE, any text survives the round
trip) and data.json (what is in it). OUTPUT appears when all of it is there, or not at all.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from pretraining.errors import UserError
from pretraining.indexed import open_checked, unigram_entropy
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

END_OF_DOCUMENT, PADDING = "<|endoftext|>", "<|padding|>"
SMALLEST_VOCABULARY = 256 + 2  # every byte, and the two above
LARGEST_VOCABULARY = 2**20
CONSOLE = Console(stderr=True)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--input",
        type=Path,
        default=Path(sysconfig.get_paths()["stdlib"]),
        help="folder of text files (default: this Python's standard library)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/data/python_stdlib"),
        help="folder to make (default: %(default)s)",
    )
    parser.add_argument(
        "--patterns",
        nargs="+",
        default=["*.py", "*.txt", "*.md", "*.rst"],
        help="names of the files to read (default: %(default)s)",
    )
    parser.add_argument(
        "--exclude",
        nargs="*",
        default=["site-packages", "test", "tests"],
        help="folder names to leave out (default: %(default)s)",
    )
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument(
        "--max-mib",
        type=float,
        default=64.0,
        help="read at most this much text (default: %(default)s MiB)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace OUTPUT if it is there")
    return parser.parse_args(argv)  # fmt: skip


def find_files(folder: Path, patterns: list[str], exclude: list[str]) -> list[Path]:
    """The files to read, sorted, so that the same folder gives the same data everywhere."""
    if not folder.is_dir():
        raise UserError(f"--input {folder} is not a folder")
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(f for f in folders if f not in exclude and not f.startswith("."))
        wanted = [Path(root, n) for n in sorted(names) if any(fnmatch(n, p) for p in patterns)]
        found += [path for path in wanted if path.is_file()]  # a pipe would be waited for
    if not found:
        raise UserError(f"no file below {folder} matches {' '.join(patterns)}")
    return found


def read_documents(files: list[Path], max_bytes: float) -> list[str]:
    """The text of each file. What is left out (empty, not UTF-8, beyond `max_bytes`) is named."""
    documents: list[str] = []
    total, unreadable, empty = 0, [], []
    unread = iter(files)
    for path in unread:
        try:
            data = path.read_bytes()
            text = data.decode("utf-8")  # unlike read_text: keeps carriage returns
        except (UnicodeDecodeError, OSError):
            unreadable.append(path)
            continue
        if not text.strip():
            empty.append(path)
            continue
        documents.append(text)
        total += len(data)
        if total >= max_bytes:
            break
    say_left_out(unreadable, "not readable as UTF-8 text")
    say_left_out(empty, "without text")
    say_left_out(list(unread), f"not read after {total / 2**20:.1f} MiB (--max-mib)")
    if not documents:
        raise UserError("the files found hold no text")
    return documents


def say_left_out(files: list[Path], why: str, shown: int = 3) -> None:
    """How many files are left out and why, with the first few names."""
    if files:
        names = ", ".join(map(printable, files[:shown])) + ", ..." * (len(files) > shown)
        count = f"{len(files)} file" + "s" * (len(files) > 1)
        print(f"left out {count} {why}: {names}", file=sys.stderr)


def printable(path: Path) -> str:
    """File names are bytes, not always of text."""
    return os.fsencode(path).decode("utf-8", "replace")


def tracked(items: list[str], what: str) -> Iterator[str]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=CONSOLE) as progress:
        yield from progress.track(items, description=f"{what:<22}")


def train_tokenizer(documents: list[str], vocab_size: int):  # -> tokenizers.Tokenizer
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if not SMALLEST_VOCABULARY <= vocab_size <= LARGEST_VOCABULARY:
        raise UserError(
            f"--vocab-size {vocab_size}: byte-level BPE needs at least {SMALLEST_VOCABULARY}, and "
            f"no model uses more than {LARGEST_VOCABULARY}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(tracked(documents, "training tokenizer"), trainer)
    if (found := tokenizer.get_vocab_size()) < vocab_size:
        print(
            f"the vocabulary has {found} tokens, not {vocab_size} (--vocab-size): the text holds "
            "no more pairs that occur twice",
            file=sys.stderr,
        )
    return tokenizer


def write_tokens(documents: list[str], tokenizer, prefix: Path) -> None:
    import numpy
    import torch

    with CONSOLE.status("loading Megatron-core"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Megatron lacks here is not used here
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    dtype = DType.optimal_dtype(tokenizer.get_vocab_size())
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    end = tokenizer.token_to_id(END_OF_DOCUMENT)
    tokenizer.encode_special_tokens = True  # "<|endoftext|>" in a text is text, and ends nothing
    for text in tracked(documents, "writing .bin/.idx"):
        ids = [*tokenizer.encode(text, add_special_tokens=False).ids, end]
        builder.add_document(torch.from_numpy(numpy.array(ids, dtype=numpy.int64)), [len(ids)])
    builder.finalize(f"{prefix}.idx")


def describe(prefix: Path, tokenizer, source: Path) -> dict[str, object]:
    data = open_checked(str(prefix), tokenizer.get_vocab_size())
    return {
        "source": str(source),
        "documents": data.documents,
        "tokens": len(data.tokens),
        "vocab_size": tokenizer.get_vocab_size(),
        "end_of_document": tokenizer.token_to_id(END_OF_DOCUMENT),
        "padding": tokenizer.token_to_id(PADDING),
        "unigram_entropy_nats": round(unigram_entropy(data.tokens), 6),
    }


def publish(partial: Path, output: Path) -> None:
    """Moves the finished folder into place; a reader sees the old one or the new one, whole."""
    for path in partial.iterdir():
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
    old = None
    if output.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{output.name}.old-", dir=output.parent))
        output.rename(old / "data")
    partial.rename(output)
    if old is not None:
        shutil.rmtree(old)


def check_output(output: Path, source: Path, overwrite: bool) -> None:
    """Nothing but data that were made here is ever replaced."""
    if source.resolve().is_relative_to(output.resolve()):
        raise UserError(f"--output {output} holds --input {source}: name another folder")
    if not output.exists():
        return
    if not overwrite:
        raise UserError(f"{output} is already there; --overwrite replaces it")
    if not (output / "data.json").is_file() and not (output.is_dir() and not any(output.iterdir())):
        raise UserError(f"--overwrite replaces prepared data; {output} has no data.json in it")


def prepare(args: argparse.Namespace) -> dict[str, object]:
    """Makes `args.output` and returns what its data.json says."""
    output: Path = args.output
    check_output(output, args.input, args.overwrite)
    documents = read_documents(
        find_files(args.input, args.patterns, args.exclude), args.max_mib * 2**20
    )
    tokenizer = train_tokenizer(documents, args.vocab_size)
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{output.name}.partial-", dir=output.parent))
    try:
        write_tokens(documents, tokenizer, partial / "text")
        facts = describe(partial / "text", tokenizer, args.input)
        tokenizer.save(str(partial / "tokenizer.json"))
        (partial / "data.json").write_text(json.dumps(facts, indent=2) + "\n")
        partial.chmod(0o755)
        publish(partial, output)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return facts


def main() -> int:
    args = arguments()
    try:
        facts = prepare(args)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was left behind", file=sys.stderr)
        return 130
    print(
        f"{args.output}: {facts['documents']} documents, {facts['tokens']} tokens, vocabulary "
        f"{facts['vocab_size']}, unigram entropy {facts['unigram_entropy_nats']} nats per token"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
