"""Write the calibration text and the held-out text from a folder of plain-text books.

OUT/calibration.txt: the CALIBRATION books, whole, joined with blank lines, in that order.
OUT/heldout.txt: the HELD_OUT book. No book is in both, and no demo checkpoint (nor its
tokenizer) has seen the held-out book. Line ends become LF, trailing blanks are dropped.

usage: make_calib.py BOOKS_DIR OUT      (in the project: calib)
"""
import re, sys
from pathlib import Path

CALIBRATION = ["sherlock-holmes", "pride-and-prejudice", "jungle-book"]
HELD_OUT = "alice-in-wonderland"

def book(folder, name):
    text = (folder / f"{name}.txt").read_bytes().decode("utf-8")
    lines = [line.rstrip() for line in re.sub(r"\r\n?", "\n", text).split("\n")]
    return "\n".join(lines).strip() + "\n"

def shared_lines(a, b):
    """Lines of more than 40 characters that two texts have in common."""
    return {s for s in a.split("\n") if len(s) > 40} & set(b.split("\n"))

def main():
    books, out = Path(sys.argv[1]), Path(sys.argv[2])
    assert HELD_OUT not in CALIBRATION
    calibration = "\n\n".join(book(books, name) for name in CALIBRATION)
    held_out = book(books, HELD_OUT)
    assert not shared_lines(calibration, held_out)
    for name, text in (("calibration.txt", calibration), ("heldout.txt", held_out)):
        (out / name).write_bytes(text.encode("utf-8"))
        print(name, len(text.encode("utf-8")), "bytes,", len(text.split()), "words")

if __name__ == "__main__":
    main()
