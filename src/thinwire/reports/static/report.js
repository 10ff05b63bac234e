// Draws every chart of the page with uPlot; the inline SVG of a chart stays where its drawing failed.
(function () {
  "use strict";
  const root = document.documentElement;
  const errors = [];
  function note(message) {
    errors.push(String(message));
    root.dataset.errors = errors.join("\n");
  }
  addEventListener("error", (event) => note(event.message));
  addEventListener("unhandledrejection", (event) => note(event.reason));

  const data = JSON.parse(document.getElementById("series").textContent);
  const hidden = new Set();
  const charts = [];
  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const armColour = (arm) => colour("--arm-" + arm);
  const FONT = '12px -apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif';

  function text(value) {
    if (value === null || value === undefined) return "-";
    const size = Math.abs(value);
    if (size >= 1000) return value.toFixed(0);
    if (size !== 0 && size < 0.001) return value.toExponential(1);
    return value.toFixed(size >= 100 ? 1 : size >= 10 ? 2 : 3);
  }

  // y always holds 0 so that levels can be compared by eye; a zoomed part may leave it.
  function range(chart) {
    return (plot, low, high) => {
      if (low === null || high === null) return [0, 1];
      const shown = plot.scales.x;
      const zoomed = shown.min !== null && (shown.min > chart.x[0] || shown.max < chart.x[chart.x.length - 1]);
      if (!zoomed) {
        low = Math.min(low, 0);
        high = Math.max(high, 0);
      }
      const pad = (high - low) * 0.05 || Math.abs(high) * 0.05 || 1;
      return [low === 0 ? 0 : low - pad, high === 0 && low < 0 ? 0 : high + pad];
    };
  }

  // A line that lacks steps of its chart's axis names its own: what lies between stays undefined, which
  // uPlot draws through, while null (a reading that is not finite) breaks the line.
  function onAxis([arm, seed, values, places], length) {
    if (!places) return [arm, seed, values];
    const spread = Array(length).fill(undefined);
    places.forEach((place, i) => { spread[place] = values[i]; });
    return [arm, seed, spread];
  }

  // Unzoomed, every chart spans the same steps, so that one position means one step all over the page.
  function wholeRun(chart) {
    return (_, low, high) => {
      const all = low === chart.x[0] && high === chart.x[chart.x.length - 1];
      return all ? [data.steps[0], Math.max(data.steps[1], data.steps[0] + 1)] : [low, high];
    };
  }

  function shade(chart) {
    return (plot) => {
      const { ctx, bbox } = plot;
      ctx.save();
      ctx.beginPath();
      ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
      ctx.clip();
      ctx.globalAlpha = 0.09 / data.seeds.length;
      for (const [arm, first, last] of chart.spans) {
        if (hidden.has(arm)) continue;
        const left = plot.valToPos(first, "x", true);
        ctx.fillStyle = armColour(arm);
        ctx.fillRect(left, bbox.top, Math.max(plot.valToPos(last, "x", true) - left, 2), bbox.height);
      }
      ctx.globalAlpha = 0.16;
      for (const [arm, steps, low, high] of chart.bands) {
        if (hidden.has(arm)) continue;
        ctx.fillStyle = armColour(arm);
        ctx.beginPath();
        steps.forEach((step, i) => ctx.lineTo(plot.valToPos(step, "x", true), plot.valToPos(low[i], "y", true)));
        for (let i = steps.length - 1; i >= 0; i -= 1) {
          ctx.lineTo(plot.valToPos(steps[i], "x", true), plot.valToPos(high[i], "y", true));
        }
        ctx.fill();
      }
      ctx.globalAlpha = 0.9;
      ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
      ctx.lineWidth = 1.2 * devicePixelRatio;
      if (chart.level !== null) {
        const at = plot.valToPos(chart.level, "y", true);
        ctx.strokeStyle = colour("--muted");
        ctx.beginPath();
        ctx.moveTo(bbox.left, at);
        ctx.lineTo(bbox.left + bbox.width, at);
        ctx.stroke();
      }
      for (const [arm, step] of chart.marks) {
        if (hidden.has(arm)) continue;
        const at = plot.valToPos(step, "x", true);
        ctx.strokeStyle = armColour(arm);
        ctx.beginPath();
        ctx.moveTo(at, bbox.top);
        ctx.lineTo(at, bbox.top + bbox.height);
        ctx.stroke();
      }
      ctx.restore();
    };
  }

  // Under each chart: the readings at the cursor, or each line's last ones, one entry an arm.
  function showValues(chart) {
    const index = chart.plot ? chart.plot.cursor.idx : null;
    const at = index === null || index === undefined ? null : chart.x[index];
    const box = chart.values;
    box.textContent = "";
    const head = document.createElement("span");
    head.className = "at";
    head.textContent = at === null ? "last reading" : "step " + at;
    if (data.seeds.length > 1) head.textContent += ", by seed";
    box.append(head);
    data.arms.forEach((name, arm) => {
      const lines = chart.lines.filter((line) => line[0] === arm);
      if (!lines.length || hidden.has(arm)) return;
      const entry = document.createElement("span");
      const swatch = document.createElement("span");
      swatch.className = "swatch";
      swatch.style.background = "var(--arm-" + arm + ")";
      const readings = document.createElement("b");
      readings.textContent = data.seeds.map((seed) => {
        const values = (lines.find((line) => line[1] === seed) || [])[2] || [];
        return text(at === null ? values.findLast((value) => value !== null && value !== undefined) : values[index]);
      }).join("  ");
      entry.append(swatch, name + " ", readings);
      box.append(entry);
    });
  }

  function series(chart) {
    const thin = chart.lines.length > data.arms.length;
    return chart.lines.map(([arm, , values]) => ({
      scale: "y",
      show: !hidden.has(arm),
      stroke: () => armColour(arm),
      width: thin ? 1.1 : 1.6,
      spanGaps: chart.points,
      points: {
        show: chart.points || values.filter((value) => Number.isFinite(value)).length === 1,
        size: thin ? 4 : 5,
        fill: () => armColour(arm),
      },
    }));
  }

  function axis(extra) {
    return Object.assign({
      stroke: () => colour("--muted"),
      grid: { stroke: () => colour("--rule"), width: 1 },
      ticks: { show: false },
      font: FONT,
      labelFont: FONT,
      labelSize: 18,
      gap: 6,
    }, extra);
  }

  function draw(chart, done) {
    let first = true;
    const options = {
      width: chart.box.clientWidth || chart.figure.clientWidth,
      height: 250,
      padding: [8, 10, 0, 0],
      legend: { show: false },
      cursor: {
        sync: { key: "step", scales: ["x", null] },
        drag: { x: true, y: false },
        points: { size: 7, width: 0 },
      },
      scales: { x: { time: false, range: wholeRun(chart) }, y: { range: range(chart) } },
      axes: [
        axis({ label: "step", size: 26, grid: { show: false } }),
        axis({ label: chart.unit, size: 44, labelGap: 2 }),
      ],
      series: [{}].concat(series(chart)),
      hooks: {
        drawClear: [shade(chart)],
        setCursor: [() => showValues(chart)],
        draw: [() => {
          if (first) done(chart);
          first = false;
        }],
      },
    };
    chart.plot = new uPlot(options, [chart.x].concat(chart.lines.map((line) => line[2])), chart.box);
    showValues(chart);
    new ResizeObserver(() => {
      const width = chart.box.clientWidth;
      if (width > 0 && width !== chart.plot.width) chart.plot.setSize({ width, height: 250 });
    }).observe(chart.box);
  }

  function toggle(button, arm) {
    if (hidden.has(arm)) hidden.delete(arm); else hidden.add(arm);
    button.setAttribute("aria-pressed", String(!hidden.has(arm)));
    for (const chart of charts) {
      chart.lines.forEach((line, i) => {
        if (line[0] === arm) chart.plot.setSeries(i + 1, { show: !hidden.has(arm) });
      });
      showValues(chart);
    }
  }

  let drawn = 0;
  for (const spec of data.charts) {
    const figure = document.getElementById(spec.id);
    const chart = {
      figure,
      box: figure.querySelector(".plot"),
      values: figure.querySelector(".values"),
      x: data.x[spec.x],
      lines: spec.lines.map((line) => onAxis(line, data.x[spec.x].length)),
      spans: spec.spans,
      bands: spec.bands,
      marks: spec.marks,
      level: spec.level,
      unit: spec.unit,
      points: spec.points,
    };
    try {
      figure.classList.add("drawn");
      chart.box.hidden = false;
      draw(chart, () => {
        drawn += 1;
        root.dataset.charts = String(drawn);
        if (drawn === data.charts.length) root.dataset.report = "drawn";
      });
      charts.push(chart);
    } catch (error) {
      figure.classList.remove("drawn");
      note(error);
    }
  }
  document.querySelectorAll(".arms button").forEach((button, arm) => {
    button.disabled = false;
    button.addEventListener("click", () => toggle(button, arm));
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const chart of charts) chart.plot.redraw();
  });
})();
