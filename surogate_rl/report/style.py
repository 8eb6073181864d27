"""The page's own style and script: it loads nothing from anywhere."""

CSS = """
:root { color-scheme: light dark; --bg: #fbfbfa; --card: #ffffff; --text: #1c1e21; --soft: #646a73; --rule: #e4e5e8; --line: #2f6fb3;
  --band: #2f6fb322; --hot: 214, 90, 30; --good: #1f7a44; --bad: #b3352c; }
@media (prefers-color-scheme: dark) { :root { --bg: #15171a; --card: #1d2024; --text: #e6e7e9; --soft: #9aa1ab; --rule: #32363c;
  --line: #74aeea; --band: #74aeea2e; --hot: 255, 128, 60; --good: #63c48b; --bad: #f0857c; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1240px; padding: 28px 24px 60px; background: var(--bg); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 24px; margin: 0 0 2px; } h2 { font-size: 18px; margin: 34px 0 10px; } p { margin: 4px 0; } .soft { color: var(--soft); }
.tiles { display: flex; flex-wrap: wrap; gap: 10px; margin-top: 18px; }
.tile { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 8px 14px; min-width: 116px; }
.tile b { display: block; font-size: 19px; font-weight: 600; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 13px; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(340px, 1fr)); gap: 14px; }
.chart { margin: 0; background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 10px 12px 4px;
  position: relative; }
.chart figcaption { display: flex; justify-content: space-between; gap: 12px; font-size: 14px; }
.chart .name { overflow-wrap: anywhere; } .chart .last { color: var(--soft); font-variant-numeric: tabular-nums; white-space: nowrap; }
.chart svg { display: block; width: 100%; height: auto; }
.grid { stroke: var(--rule); stroke-width: 1; } .tick { fill: var(--soft); font-size: 11px; }
.line { fill: none; stroke: var(--line); stroke-width: 1.6; stroke-linejoin: round; } .raw { opacity: .4; stroke-width: 1; }
.band { fill: var(--band); stroke: none; }
.dot { fill: var(--line); } .mark { fill: var(--card); stroke: var(--line); stroke-width: 2; }
.tip { position: absolute; pointer-events: none; background: var(--text); color: var(--bg); border-radius: 5px; padding: 2px 7px;
  font-size: 12px; white-space: nowrap; transform: translate(-50%, -130%); display: none; }
details > summary { cursor: pointer; } details.step { border-top: 1px solid var(--rule); padding: 8px 0; }
details.step > summary { font-weight: 600; }
.rollout { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 10px 14px; margin: 10px 0; }
.facts { display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 13px; color: var(--soft); margin-bottom: 6px; }
.facts b { color: var(--text); font-weight: 600; font-variant-numeric: tabular-nums; } .facts b.good { color: var(--good); }
.facts b.bad { color: var(--bad); }
.text { font: 13.5px/1.65 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; margin: 4px 0; }
.prompt { color: var(--soft); max-height: 13em; overflow: auto; }
.answer { color: var(--soft); border-left: 3px solid var(--rule); padding-left: 10px; max-height: 13em; overflow: auto; }
.t1 { background: rgba(var(--hot), .12); } .t2 { background: rgba(var(--hot), .24); } .t3 { background: rgba(var(--hot), .36); }
.t4 { background: rgba(var(--hot), .5); } .t5 { background: rgba(var(--hot), .68); } .legend span { padding: 1px 7px; border-radius: 3px; }
.nl { color: var(--soft); } pre { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 12px; overflow: auto;
  font-size: 13px; }
"""

SCRIPT = """
for (const svg of document.querySelectorAll('svg[data-points]')) {
  const points = svg.dataset.points.split(';').map(p => p.split(','));
  const tip = document.createElement('div'); tip.className = 'tip'; svg.parentNode.appendChild(tip);
  const mark = document.createElementNS('http://www.w3.org/2000/svg', 'circle');
  mark.setAttribute('class', 'mark'); mark.setAttribute('r', 4); mark.style.display = 'none'; svg.appendChild(mark);
  svg.addEventListener('mousemove', event => {
    const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width, at = (event.clientX - box.left) * scale;
    let best = points[0];
    for (const point of points) if (Math.abs(point[1] - at) < Math.abs(best[1] - at)) best = point;
    mark.setAttribute('cx', best[1]); mark.setAttribute('cy', best[2]); mark.style.display = '';
    tip.textContent = 'step ' + best[0] + ': ' + best[3]; tip.style.display = 'block';
    tip.style.left = (svg.offsetLeft + best[1] / scale) + 'px'; tip.style.top = (svg.offsetTop + best[2] / scale) + 'px';
  });
  svg.addEventListener('mouseleave', () => { tip.style.display = 'none'; mark.style.display = 'none'; });
}
"""
