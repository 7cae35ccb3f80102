"""The report as one self-contained page of HTML: the Markdown rendered, its pictures inside, nothing loaded from elsewhere."""

import base64
import re
from collections.abc import Mapping
from html import escape

from markdown_it import MarkdownIt

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; font-size: 13px; }
th, td { border: 1px solid #ccc; padding: 0.25rem 0.6rem; text-align: left; vertical-align: top; }
th { background: #f3f3f3; }
pre { background: #f7f7f7; padding: 0.7rem; overflow-x: auto; font-size: 12px; }
img { max-width: 100%; }
ins { background: #e2f5e2; text-decoration: none; }
del { background: #fbe3e3; text-decoration: none; }
"""


def page(title: str, markdown: str, pictures: Mapping[str, bytes]) -> str:
    """HTML of a report. `pictures` are PNG by the name that the text refers to; HTML in the text is shown, not obeyed."""
    body = MarkdownIt("commonmark", {"html": False}).enable("table").disable(["link", "autolink"]).render(markdown)

    def picture(tag: "re.Match[str]") -> str:
        name, alternative = tag[1], tag[2]
        if name not in pictures:
            return alternative
        return f'<img src="data:image/png;base64,{base64.b64encode(pictures[name]).decode()}" alt="{alternative}" />'

    body = re.sub(r'<img src="([^"]*)" alt="([^"]*)"[^>]*>', picture, body)
    body = re.sub(r'<code class="language-diff">(.*?)</code>', _coloured, body, flags=re.DOTALL)
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{body}</body></html>\n'


def _coloured(code: "re.Match[str]") -> str:
    """Added and removed lines of a diff in their colours; its text is escaped already."""
    lines = []
    for line in code[1].split("\n"):
        tag = {"+": "ins", "-": "del"}.get(line[:1])
        lines.append(f"<{tag}>{line}</{tag}>" if tag else line)
    return f"<code>{chr(10).join(lines)}</code>"
