"""The look of a report: system fonts, a calm page, light and dark."""

STYLE = """
:root { --paper: #ffffff; --ground: #f5f6f8; --ink: #1c2430; --soft: #5b6675; --rule: #dfe3e8; --accent: #0b6b8f;
  --faint: #9fc4d4; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #171c23; --ground: #0f1318; --ink: #e6eaf0; --soft: #9aa6b4; --rule: #2c343f; --accent: #6cc4e4;
    --faint: #2f5a6b; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 68rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
header, section { background: var(--paper); border: 1px solid var(--rule); border-radius: 12px;
  padding: 1.5rem 1.75rem; margin-bottom: 1.25rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .6rem; letter-spacing: -.01em; }
h2 { font-size: 1.15rem; margin: 0 0 .9rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .4rem; }
h3 small { font-weight: 400; color: var(--soft); margin-left: .5rem; }
.kicker { margin: 0; color: var(--accent); font-size: .85rem; font-weight: 600; }
.lead { font-size: 1.1rem; margin: 0 0 1.2rem; max-width: 52rem; }
.small { font-size: .86rem; color: var(--soft); margin: .9rem 0 0; max-width: 56rem; }
.tiles { display: flex; flex-wrap: wrap; gap: .9rem; }
.tile { flex: 1 1 12rem; border: 1px solid var(--rule); border-radius: 10px; padding: .7rem 1rem; }
.tile b { display: block; font-size: 1.8rem; line-height: 1.2; font-variant-numeric: tabular-nums; }
.tile:first-child b { color: var(--accent); }
.tile span { color: var(--soft); font-size: .86rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .94rem; font-variant-numeric: tabular-nums; }
th, td { padding: .45rem .3rem .45rem .4rem; text-align: right; white-space: nowrap; }
thead th { font-size: .82rem; color: var(--soft); font-weight: 500; }
thead th[colspan] { text-align: center; color: var(--ink); font-weight: 600; border-bottom: 1px solid var(--rule); }
tbody th { text-align: left; font-weight: 600; }
tbody tr { border-top: 1px solid var(--rule); }
.sd { color: var(--soft); font-size: .8rem; }
table.pictures { table-layout: fixed; min-width: 46rem; }
table.pictures tr { border: 0; }
table.pictures th { text-align: center; font-size: .8rem; font-weight: 500; color: var(--soft); padding: 0 .1rem .3rem;
  white-space: normal; vertical-align: bottom; }
table.pictures td { padding: .12rem; text-align: center; }
table.pictures img { width: 100%; height: auto; display: block; border-radius: 4px; }
table.pictures .caption td { text-align: left; font-size: .84rem; color: var(--soft); padding: .1rem .15rem .9rem;
  white-space: normal; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; margin: .2rem 0 0; font-size: .86rem; }
.legend i { display: inline-block; width: .95rem; height: .7rem; border-radius: 2px; margin-right: .4rem;
  border: 1px solid var(--rule); }
.legend i.line { height: 0; border: 0; border-top: 2px solid #fff; outline: 3px solid #777; vertical-align: middle; }
.legend i.heat { width: 3rem; background: linear-gradient(90deg, #000004, #51127c, #b73779, #fc8961, #fcfdbf); }
.curves { display: grid; grid-template-columns: repeat(auto-fill, minmax(17rem, 1fr)); gap: .6rem 1.2rem; }
.curve { margin: 0; }
.curve figcaption { font-size: .84rem; color: var(--soft); }
.curve svg { width: 100%; height: auto; display: block; }
.curve text { font-size: 10px; fill: var(--soft); }
.curve .grid { stroke: var(--rule); stroke-width: 1; }
.curve polyline { fill: none; stroke-linejoin: round; }
.curve .raw { stroke: var(--faint); stroke-width: 1; }
.curve .mean { stroke: var(--accent); stroke-width: 2; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .35rem 1.4rem; margin: 0; font-size: .92rem; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 40rem) { dl { grid-template-columns: 1fr; } dd { margin-bottom: .4rem; } }
@media print { body { background: #fff; } header, section { break-inside: avoid; } }
"""
