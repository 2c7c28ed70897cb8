// Draws the charts of a page with uPlot: a cursor that all of them share, numbers under it, and a part of the time drawn
// large by dragging over it (twice clicked: all of it again). Without this script the server's own pictures stay.
"use strict";

const HEIGHT_PX = 160;
const WHOLE = Array.from({ length: 13 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat(); // messages are not cut
const plots = new Set();

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function drawCharts() {
  for (const plot of plots) {
    if (!plot.root.isConnected) {
      plot.watch.disconnect();
      plot.destroy();
      plots.delete(plot);
    }
  }
  for (const figure of document.querySelectorAll("figure.chart")) {
    const canvas = figure.querySelector(".canvas");
    if (!canvas) continue;
    const lines = JSON.parse(figure.dataset.lines);
    const data = dataOf(figure, lines);
    if (!canvas.plot) {
      begin(figure, canvas, lines, data);
    } else {
      canvas.plot.setData(data, !canvas.plot.zoomed);
      if (canvas.plot.zoomed) canvas.plot.redraw();
    }
  }
}

function redrawCharts() {
  for (const plot of plots) plot.redraw(false, true); // colours are asked for anew
}

function dataOf(figure, lines) {
  const count = lines[0].values.length;
  const first = Number(figure.dataset.first);
  const step = (Number(figure.dataset.last) - first) / Math.max(count - 1, 1);
  const times = Array.from({ length: count }, (_, place) => first + place * step);
  const nothing = times.map(() => null);
  return [
    times,
    ...lines.map((line) => line.values.map((value, place) => gap(line.values, value, place))),
    ...lines.map((line) => (line.known.length ? line.known : nothing)), // always there: it may come while the page is open
  ];
}

// One look that came late is no gap: undefined is drawn over, null is not.
function gap(values, value, place) {
  return value === null && values[place - 1] != null && values[place + 1] != null ? undefined : value;
}

function begin(figure, canvas, lines, data) {
  const tip = Object.assign(document.createElement("div"), { className: "tip", hidden: true });
  const options = {
    width: canvas.clientWidth,
    height: HEIGHT_PX,
    tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC"),
    legend: { show: false },
    padding: [12, 30, 0, 0], // half a time beside the last tick, which is not cut then
    cursor: { y: false, sync: { key: "danube" }, drag: { x: true, y: false }, points: { size: 6 } },
    scales: { y: { range: (_, low, high) => [0, Math.max(high * 1.1, 10)] } },
    axes: [
      { stroke: () => css("--muted"), grid: { stroke: () => css("--line-soft"), width: 1 }, ticks: { show: false }, values: clocks, space: 90, size: 26 },
      { stroke: () => css("--muted"), grid: { stroke: () => css("--line-soft"), width: 1 }, ticks: { show: false }, size: sizeOfNumbers, values: (_, ticks) => ticks.map(short), ...(figure.dataset.unit.includes("/s") ? {} : { incrs: WHOLE }) },
    ],
    series: [{}, ...lines.map(seriesOf), ...lines.map(partOf)],
    hooks: {
      setCursor: [(plot) => point(plot, lines, tip)],
      setSelect: [(plot) => { plot.zoomed = plot.zoomed || plot.select.width > 0; }],
    },
  };
  const plot = new uPlot(options, data, canvas);
  plot.over.append(tip);
  plot.over.addEventListener("dblclick", () => { plot.zoomed = false; });
  plot.watch = new ResizeObserver(() => {
    if (canvas.clientWidth && canvas.clientWidth !== plot.width) plot.setSize({ width: canvas.clientWidth, height: HEIGHT_PX });
  });
  plot.watch.observe(canvas);
  canvas.plot = plot;
  canvas.closest(".plot").classList.add("drawn");
  plots.add(plot);
}

function seriesOf(line) {
  const colour = `--c${line.colour}`;
  return {
    label: line.label,
    width: 1.6,
    stroke: () => css(colour),
    fill: () => `${css(colour)}1a`,
    points: { show: false },
  };
}

// What is known of a sum while not all brokers answer.
function partOf(line) {
  return { ...seriesOf(line), fill: undefined, dash: [4, 4] };
}

function clocks(plot, ticks, _, __, step) {
  return ticks.map((seconds) => new Date(seconds * 1000).toISOString().slice(11, step < 60 ? 19 : 16) + "Z");
}

// As wide as the longest number, so that none is cut.
function sizeOfNumbers(plot, values) {
  return 18 + 7 * Math.max(...(values || []).map((text) => text.length), 2);
}

function short(value) {
  return value.toLocaleString("en", { maximumFractionDigits: 1 });
}

function point(plot, lines, tip) {
  const place = plot.cursor.idx;
  tip.hidden = place == null || plot.cursor.left < 0;
  if (tip.hidden) return;
  const time = new Date(plot.data[0][place] * 1000).toISOString().slice(11, 19) + "Z";
  const said = lines.map((line, number) => {
    const value = plot.data[number + 1][place];
    const part = plot.data[number + 1 + lines.length][place];
    return `${line.label} ${value != null ? short(value) : part != null ? `unknown, at least ${short(part)}` : "–"}`;
  });
  tip.textContent = `${time}  ${said.join("  ")}`;
  const room = plot.over.clientWidth - tip.offsetWidth;
  tip.style.left = `${Math.min(Math.max(plot.cursor.left + 8, 0), Math.max(room, 0))}px`;
}

drawCharts();
