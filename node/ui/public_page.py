"""A run's public page: one HTML file without scripts, which any web server or file host can serve.

Names and texts are members' words: all of them are escaped, and the page's policy lets nothing be loaded or run.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from typing import Final

from ..base.figures import count, loss
from ..status.public_run import Point, PublicMember, PublicRun

# The page loads itself again after this number of seconds.
REFRESH_SECONDS: Final = 60
# Rows of the table; the board's file has all of them.
MAX_ROWS_SHOWN: Final = 500
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 720.0, 220.0, 56.0, 24.0
_STYLE: Final = """
:root { color-scheme: light dark; --ground: #f6f6f3; --card: #fff; --ink: #1d1f21; --faint: #5f646b; --line: #dddcd6;
  --well: #1a7f37; --curve: #0a6b8a; }
@media (prefers-color-scheme: dark) { :root { --ground: #14161a; --card: #1d2026; --ink: #e8e8e6; --faint: #a3a7af;
  --line: #31353d; --well: #4ac26b; --curve: #54b6d6; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 64rem; padding: 1.25rem; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1rem; margin: 0 0 .5rem; }
p { margin: .25rem 0; overflow-wrap: anywhere; }
.faint, th, dt, text { color: var(--faint); fill: var(--faint); }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .75rem; margin: 1rem 0; }
dl div, section { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .75rem 1rem; }
dd { margin: 0; font-size: 1.35rem; font-weight: 600; font-variant-numeric: tabular-nums; }
section { margin: 1rem 0; }
svg { width: 100%; height: auto; display: block; }
polyline { fill: none; stroke: var(--curve); stroke-width: 2; }
line { stroke: var(--line); }
text { font-size: 12px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { text-align: left; padding: .25rem .9rem .25rem 0; white-space: nowrap; }
th { font-weight: normal; border-bottom: 1px solid var(--line); }
.number { text-align: right; }
.live { color: var(--well); }
code { overflow-wrap: anywhere; }
a { color: var(--curve); }
"""


def public_page(run: PublicRun, losses: Sequence[Point], throughput: Sequence[Point], board: str) -> str:
    """Return the page as HTML.

    ``losses``: (Unix seconds, mean loss in nats a token), ``throughput``: (Unix seconds, tokens a second), both in
    order. ``board``: name of the board's file, in the same folder.
    """
    name = escape(run.name)
    shown = run.members[:MAX_ROWS_SHOWN]
    more = len(run.members) - len(shown)
    notice = f"<p><strong>{escape(run.notice)}</strong></p>" if run.notice else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="refresh" content="{REFRESH_SECONDS}">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{name}: {run.live} live, loss {loss(run.loss)}</title>
<style>{_STYLE}</style>
</head>
<body>
<header>
<h1>{name}</h1>
<p class="faint">A model of {count(run.parameters)} parameters, trained by volunteers with farandole.
Run <code>{run.run_id}</code></p>
{notice}
</header>
<main>
<dl>
{_tile("members live", str(run.live))}
{_tile("round", f"{run.round:,}")}
{_tile("loss, nats a token", loss(run.loss))}
{_tile("tokens", count(run.tokens))}
{_tile("tokens a second", count(run.tokens_per_second))}
</dl>
<section>
<h2>Loss of the live members, mean</h2>
{_chart(losses, "loss", 3)}
</section>
<section>
<h2>Tokens a second</h2>
{_chart(throughput, "tokens a second", 0)}
</section>
<section>
<h2>Tokens by member</h2>
<p class="faint">Each member counts its own tokens and signs the count; nobody has confirmed them. Together:
{run.tokens:,}. <a href="{escape(board)}">{escape(board)}</a> has the signatures: check them with
<code>farandole run board {escape(board)}</code>.</p>
<div class="scroll" tabindex="0" role="region" aria-label="Tokens by member">
<table>
<thead><tr><th scope="col">member</th><th scope="col">state</th><th scope="col" class="number">tokens</th>
<th scope="col" class="number">share</th><th scope="col" class="number">rounds</th>
<th scope="col" class="number">tokens/s</th><th scope="col">device</th></tr></thead>
<tbody>
{"".join(_row(member, run.tokens) for member in shown)}</tbody>
</table>
</div>
{f"<p class='faint'>and {more:,} more in the file</p>" if more else ""}
</section>
</main>
<footer class="faint"><p>Written {_time(run.at)}.</p></footer>
</body>
</html>
"""


def _tile(label: str, value: str) -> str:
    return f"<div><dt>{label}</dt><dd>{value}</dd></div>"


def _row(member: PublicMember, total: int) -> str:
    share = f"{member.tokens / total:.1%}" if total else "-"
    rate = count(member.tokens_per_second) if member.state == "live" else "-"
    state = f'<td class="{member.state}">{member.state}</td>'
    numbers = "".join(f'<td class="number">{text}</td>' for text in (f"{member.rounds:,}", rate))
    return (
        f'<tr><td title="{escape(member.peer_id)}">{escape(member.peer_id[-8:])}</td>{state}'
        f'<td class="number">{member.tokens:,}</td><td class="number">{share}</td>{numbers}'
        f"<td>{escape(member.device)}</td></tr>\n"
    )


def _chart(points: Sequence[Point], label: str, digits: int) -> str:
    """Draw a curve over time as SVG, with its least and greatest values and its first and last times."""
    if len(points) < 2:
        return '<p class="faint">no curve yet</p>'
    (first, _), (last, _) = points[0], points[-1]
    low, high = min(y for _, y in points), max(y for _, y in points)
    across, up = (_WIDTH - _LEFT) / max(last - first, 1e-9), (_HEIGHT - _BOTTOM - 8) / max(high - low, 1e-9)
    path = " ".join(f"{_LEFT + (x - first) * across:.1f},{_HEIGHT - _BOTTOM - (y - low) * up:.1f}" for x, y in points)
    bottom = _HEIGHT - _BOTTOM
    words = f"{label}: {points[0][1]:,.{digits}f} at first, {points[-1][1]:,.{digits}f} now"
    return f"""<svg viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" role="img" aria-label="{words}">
<line x1="{_LEFT}" y1="8" x2="{_LEFT}" y2="{bottom}"/><line x1="{_LEFT}" y1="{bottom}" x2="{_WIDTH}" y2="{bottom}"/>
<text x="{_LEFT - 6}" y="16" text-anchor="end">{high:,.{digits}f}</text>
<text x="{_LEFT - 6}" y="{bottom}" text-anchor="end">{low:,.{digits}f}</text>
<text x="{_LEFT}" y="{_HEIGHT - 6}">{_time(first)}</text>
<text x="{_WIDTH}" y="{_HEIGHT - 6}" text-anchor="end">{_time(last)}</text>
<polyline points="{path}"/>
</svg>"""


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")
