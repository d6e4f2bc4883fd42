"""Write the calibration text and the held-out text from a folder of plain-text books.

OUT/calibration.txt: the CALIBRATION books, whole, joined with blank lines, in that order.
OUT/heldout.txt: the HELD_OUT book, a story. OUT/heldout-science.txt: the beginning of another,
EXPOSITION, which explains. No book is in two of them, and no demo checkpoint (nor its tokenizer)
has seen the held-out ones. Line ends become LF, trailing blanks are dropped.

usage: make_calib.py BOOKS_DIR OUT      (in the project: calib)
"""
import re, sys
from pathlib import Path

CALIBRATION = ["sherlock-holmes", "pride-and-prejudice", "jungle-book"]
HELD_OUT = "alice-in-wonderland"
# Introduction and first three chapters: from one line up to another, each the last of its kind.
EXPOSITION, BEGIN, END = "origin-of-species", "INTRODUCTION.", "CHAPTER IV."

def book(folder, name):
    text = (folder / f"{name}.txt").read_bytes().decode("utf-8")
    lines = [line.rstrip() for line in re.sub(r"\r\n?", "\n", text).split("\n")]
    return "\n".join(lines).strip() + "\n"

def exposition(folder):
    """The copy has an empty line after every line, and more of them between paragraphs and pages."""
    text = re.sub(r"\r\n?", "\n", (folder / f"{EXPOSITION}.txt").read_bytes().decode("utf-8"))
    start, end = text.rindex(f"\n{BEGIN}\n"), text.rindex(f"\n{END}\n")
    paragraphs = re.split(r"\n{3,}", text[start:end].replace("\u00a0", " ").strip())
    lines = ["\n".join(line.strip() for line in re.split(r"\n+", p) if line.strip()) for p in paragraphs]
    # Its pages end inside sentences.
    return re.sub(r"\n\n(?=[a-z])", "\n", "\n\n".join(p for p in lines if p)) + "\n"

def shared_lines(a, b):
    """Lines of more than 40 characters that two texts have in common."""
    return {s for s in a.split("\n") if len(s) > 40} & set(b.split("\n"))

def main():
    books, out = Path(sys.argv[1]), Path(sys.argv[2])
    assert HELD_OUT not in CALIBRATION
    calibration = "\n\n".join(book(books, name) for name in CALIBRATION)
    held_out = book(books, HELD_OUT)
    science = exposition(books)
    for one, other in ((calibration, held_out), (calibration, science), (held_out, science)):
        assert not shared_lines(one, other)
    files = {"calibration.txt": calibration, "heldout.txt": held_out, "heldout-science.txt": science}
    for name, text in files.items():
        (out / name).write_bytes(text.encode("utf-8"))
        print(name, len(text.encode("utf-8")), "bytes,", len(text.split()), "words")

if __name__ == "__main__":
    main()
