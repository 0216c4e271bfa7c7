"""The style sheet and the script of a report's page: dark or light as the reader's screen, values where the pointer is. Pure."""

STYLE = """
:root { color-scheme: light dark; --back: #fff; --panel: #f6f7f9; --text: #1c2128; --soft: #667080; --grid: #e3e6ea;
  --a: #2563c9; --b: #c2570c; --c: #0f8a6d; --d: #8a4fc7; --e: #a3aab5; --bad: #d1242f; --warn: #b7791f; --good:
  #1a7f37; }
@media (prefers-color-scheme: dark) { :root { --back: #0f1318; --panel: #171c23; --text: #e4e8ee; --soft: #939dab;
  --grid: #29303a; --a: #6aa5ff; --b: #f0883e; --c: #3fc9a4; --d: #bf8cff; --e: #626d7c; --bad: #ff6b6b; --warn:
  #e0af4f; --good: #57c46b; } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 20px; max-width: 1020px; background: var(--back); color: var(--text); font: 14px/1.45
  system-ui, sans-serif }
h1 { font-size: 22px; margin: 0 }
h2 { font-size: 15px; margin: 28px 0 8px }
p { margin: 4px 0 }
.soft, figcaption { color: var(--soft) }
figure { margin: 0 0 6px }
figcaption { font-size: 12px; padding-left: 64px }
svg { width: 100%; height: auto; display: block }
.label { font-size: 11px; fill: var(--soft) }
.end { text-anchor: end }
.middle { text-anchor: middle }
.grid { stroke: var(--grid) }
.line { fill: none; stroke-width: 1.4; stroke-linecap: round; stroke-linejoin: round }
.area { stroke: none; opacity: .8 }
.range { fill: var(--a); opacity: .18 }
path.plan { stroke: var(--soft); stroke-dasharray: 5 4; fill: none }
.a { --color: var(--a) }
.b { --color: var(--b) }
.c { --color: var(--c) }
.d { --color: var(--d) }
.e { --color: var(--e) }
.bad { --color: var(--bad) }
.warn { --color: var(--warn) }
.good { --color: var(--good) }
path.line { stroke: var(--color) }
path.thin { opacity: .35; stroke-width: 1 }
path.area, circle, rect.band { fill: var(--color) }
rect.band { opacity: .16 }
.mark { stroke: var(--color); stroke-width: 1.2; opacity: .8 }
.cursor { stroke: var(--text); opacity: 0 }
.key { margin-left: 10px; white-space: nowrap }
.key::before { content: ""; display: inline-block; width: 9px; height: 9px; border-radius: 2px; margin-right: 4px;
  background: var(--color) }
.key.plan::before { height: 0; width: 14px; border-top: 2px dashed var(--soft); background: none; vertical-align: 3px
  }
.tiles { display: flex; flex-wrap: wrap; gap: 10px; margin: 14px 0 }
.tile { background: var(--panel); border-radius: 8px; padding: 8px 14px; min-width: 104px }
.tile b { display: block; font-size: 19px; font-weight: 600 }
.tile span { color: var(--soft); font-size: 12px }
.bar { display: flex; height: 18px; border-radius: 5px; overflow: hidden; margin: 8px 0 }
.bar i { background: var(--color) }
table { border-collapse: collapse; width: 100% }
td, th { text-align: left; padding: 3px 14px 3px 0; border-bottom: 1px solid var(--grid); vertical-align: top;
  font-weight: normal }
th { color: var(--soft) }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
pre { background: var(--panel); padding: 10px 14px; border-radius: 8px; overflow-x: auto; font-size: 12px }
summary { cursor: pointer; color: var(--soft) }
#at { position: sticky; top: 0; background: var(--back); min-height: 22px; padding: 2px 0; font-variant-numeric:
  tabular-nums; z-index: 1 }
.note { border-left: 3px solid var(--warn); padding: 2px 10px; margin: 8px 0 }
"""

SCRIPT = """
let here = -1;  // the row that is shown
const rows = JSON.parse(document.getElementById("rows").textContent), at = document.getElementById("at"), idle = at.textContent;
const charts = [...document.querySelectorAll("svg[data-axis]")];
function nearest(column, value) {
  let best = 0;
  for (let i = 1; i < rows.length; i++) if (Math.abs(rows[i][column] - value) < Math.abs(rows[best][column] - value)) best = i;
  return best;
}
function show(i) {
  const row = rows[here = Math.min(rows.length - 1, Math.max(0, i))];
  for (const chart of charts) {
    const { axis, begin, end, left, inner } = chart.dataset, value = row[axis === "time" ? 0 : 1];
    const cursor = chart.querySelector(".cursor");
    cursor.setAttribute("transform", `translate(${+left + inner * (value - begin) / (end - begin || 1)} 0)`);
    cursor.style.opacity = 0.6;
  }
  at.textContent = row[2];
}
for (const chart of charts) {
  chart.addEventListener("pointermove", event => {
    const box = chart.getBoundingClientRect(), { axis, begin, end, left, inner } = chart.dataset;
    const x = (event.clientX - box.left) / box.width * chart.viewBox.baseVal.width;
    if (rows.length) show(nearest(axis === "time" ? 0 : 1, +begin + (x - left) / inner * (end - begin)));
  });
  for (const leaving of ["pointerleave", "blur"]) chart.addEventListener(leaving, () => {
    at.textContent = idle;
    charts.forEach(each => each.querySelector(".cursor").style.opacity = 0);
  });
  chart.addEventListener("keydown", event => {
    const to = { ArrowLeft: here - 1, ArrowRight: here + 1, PageUp: here - 50, PageDown: here + 50, Home: 0,
      End: rows.length }[event.key];
    if (to === undefined || !rows.length) return;
    event.preventDefault();
    show(to);
  });
}
"""
