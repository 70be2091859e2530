"""How a page looks."""

CSS = """
:root { color-scheme: light; --ink: #1b1f27; --soft: #5b6472; --line: #e3e6eb; --tint: #f6f7f9; --accent: #0b6e99; }
* { box-sizing: border-box; }
body { margin: 0; background: #fff; color: var(--ink); font: 16px/1.6 system-ui, -apple-system, "Segoe UI", Roboto,
  "Helvetica Neue", Arial, sans-serif; -webkit-font-smoothing: antialiased; }
main { max-width: 1040px; margin: 0 auto; padding: 56px 32px 96px; }
header { border-bottom: 3px solid var(--ink); padding-bottom: 20px; margin-bottom: 28px; }
h1 { font-size: 34px; line-height: 1.15; letter-spacing: -.02em; margin: 0 0 10px; }
header p { font-size: 18px; color: var(--soft); margin: 0; max-width: 46em; }
h2 { font-size: 22px; letter-spacing: -.01em; margin: 56px 0 10px; }
p { margin: 0 0 14px; max-width: 50em; }
code, pre { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
code { font-size: .9em; background: var(--tint); border-radius: 4px; padding: .1em .35em; white-space: nowrap; }
dd code { white-space: normal; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 14px; margin: 24px 0; }
.cards div { background: var(--tint); border-radius: 10px; padding: 16px 18px; }
.cards b { display: block; font-size: 25px; line-height: 1.2; letter-spacing: -.01em; }
.cards span { color: var(--soft); font-size: 14px; line-height: 1.4; display: block; margin-top: 4px; }
.wide { overflow-x: auto; margin: 18px 0 8px; }
table { border-collapse: collapse; width: 100%; font-size: 15px; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; font-size: 13px; line-height: 1.35; color: var(--soft); vertical-align: bottom;
  padding: 8px 14px 8px 0; border-bottom: 2px solid var(--ink); }
td { padding: 9px 14px 9px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.number, th.number { text-align: right; padding: 9px 0 9px 16px; white-space: nowrap; }
th.number { white-space: normal; }
th small { font-weight: 400; }
small { display: block; color: var(--soft); font-size: 12.5px; line-height: 1.4; }
.caption, figcaption { color: var(--soft); font-size: 14px; line-height: 1.5; max-width: 58em; }
figure { margin: 22px 0 26px; }
figure img { width: 100%; height: auto; display: block; }
figcaption { margin-top: 8px; }
.note { background: #fff8e6; border-left: 4px solid #e0a800; padding: 12px 16px; border-radius: 0 8px 8px 0; }
details { border: 1px solid var(--line); border-radius: 8px; margin: 10px 0; }
summary { cursor: pointer; padding: 11px 16px; font-weight: 600; }
summary:hover { background: var(--tint); }
pre { margin: 0; padding: 16px; overflow-x: auto; font-size: 13px; line-height: 1.5; background: var(--tint);
  border-top: 1px solid var(--line); border-radius: 0 0 8px 8px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 6px 24px; font-size: 15px; margin: 14px 0; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
@media print { details > pre { white-space: pre-wrap; } main { padding: 0; } }
"""
