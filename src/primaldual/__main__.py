"""`python -m primaldual`: the command line."""

from primaldual.cli import app

if __name__ == "__main__":
    app(prog_name="primaldual")
