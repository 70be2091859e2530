"""A self-contained HTML page, built from top to bottom. Nothing in it is loaded from elsewhere."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Iterable, Mapping, Sequence

from .stylesheet import CSS


class Page:
    """Collects parts in order; `html()` gives the page.

    Text is escaped. In it, `code` and **bold** are marked as in Markdown, and in a table cell a line break
    starts a smaller second line.

    >>> page = Page("A title")
    >>> page.section("Numbers").table(["name", "value"], [["a < b", "1"]])
    >>> "a &lt; b" in page.html()
    True
    """

    def __init__(self, title: str, subtitle: str = "") -> None:
        self._title = title
        self._parts = [f"<header><h1>{_inline(title)}</h1><p>{_inline(subtitle)}</p></header>"]

    def section(self, title: str, *paragraphs: str) -> Page:
        """A heading, and paragraphs under it."""
        self._parts.append(f"<h2>{_inline(title)}</h2>")
        return self.text(*paragraphs)

    def text(self, *paragraphs: str) -> Page:
        """Paragraphs."""
        self._parts += [f"<p>{_inline(text)}</p>" for text in paragraphs]
        return self

    def note(self, text: str) -> None:
        """A paragraph that stands out."""
        self._parts.append(f'<p class="note">{_inline(text)}</p>')

    def cards(self, cards: Iterable[tuple[str, str]]) -> None:
        """Large values, each with a label."""
        inner = "".join(f"<div><b>{_inline(value)}</b><span>{_inline(label)}</span></div>" for value, label in cards)
        self._parts.append(f'<div class="cards">{inner}</div>')

    def table(self, headings: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "", words: int = 1) -> None:
        """The first `words` columns are text, the others numbers, aligned on the right."""

        def line(tag: str, cells: Sequence[str]) -> str:
            return "".join(
                f"<{tag}{'' if index < words else ' class=number'}>{_cell(cell)}</{tag}>"
                for index, cell in enumerate(cells)
            )

        body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
        under = f"<p class=caption>{_inline(caption)}</p>" if caption else ""
        head = f"<thead><tr>{line('th', headings)}</tr></thead>"
        self._parts.append(f'<div class="wide"><table>{head}<tbody>{body}</tbody></table></div>{under}')

    def figure(self, svg: bytes, caption: str) -> None:
        """A picture; as an image of its own, so that names inside one SVG cannot meet those of another."""
        source = f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
        alternative = html.escape(re.sub(r"[`*]", "", caption))
        self._parts.append(
            f'<figure><img src="{source}" alt="{alternative}"><figcaption>{_inline(caption)}</figcaption></figure>'
        )

    def details(self, summary: str, text: str) -> None:
        """Preformatted text that opens on a click."""
        self._parts.append(f"<details><summary>{_inline(summary)}</summary><pre>{html.escape(text)}</pre></details>")

    def facts(self, facts: Mapping[str, str]) -> None:
        """A list of names and what they stand for."""
        inner = "".join(f"<dt>{_inline(name)}</dt><dd>{_inline(value)}</dd>" for name, value in facts.items())
        self._parts.append(f"<dl>{inner}</dl>")

    def html(self) -> str:
        """The whole page."""
        body = "\n".join(self._parts)
        return (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{html.escape(self._title)}</title>\n<style>{CSS}</style>\n</head>\n"
            f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
        )


def _inline(text: str) -> str:
    escaped = html.escape(text)
    escaped = re.sub(r"`([^`]+)`", r"<code>\1</code>", escaped)
    return re.sub(r"\*\*([^*]+)\*\*", r"<b>\1</b>", escaped)


def _cell(text: str) -> str:
    first, _, second = text.partition("\n")
    return _inline(first) + (f"<small>{_inline(second)}</small>" if second else "")
