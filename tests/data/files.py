"""Small `.ts` files for tests."""

import zipfile
from pathlib import Path

HEADER = """# a comment
@problemName Toy
@timeStamps false
@missing true
@univariate false
@dimensions 2
@equalLength {equal}
@classLabel true b A
@data
"""
ROWS = ("1,2,3:4,5,6:A", "7,8,?:1,?,2:b", "0,-1e1,2.5:3,3,3:A")


def text(*rows: str, equal: bool = True, header: str = HEADER) -> str:
    """A file of these series."""
    return header.format(equal=str(equal).lower()) + "\n".join(rows or ROWS) + "\n"


def folder(directory: Path, name: str = "Toy", train: str | None = None, test: str | None = None) -> Path:
    """`<Name>/<Name>_{TRAIN,TEST}.ts` in a directory; gives the directory."""
    (directory / name).mkdir(parents=True, exist_ok=True)
    for part, content in (("TRAIN", train), ("TEST", test)):
        (directory / name / f"{name}_{part}.ts").write_text(text() if content is None else content)
    return directory


def archive(directory: Path, name: str = "Toy", inside: str = "", **content: str) -> Path:
    """`<Name>.zip` in a directory; gives the zip."""
    path = directory / f"{name}.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as stream:
        for part in ("TRAIN", "TEST"):
            stream.writestr(f"{inside}{name}_{part}.ts", content.get(part.lower(), text()))
    return path
