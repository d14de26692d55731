"use strict";
(() => {
  const tip = document.getElementById("tip");
  const show = (text, x, y) => {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.width - 4))}px`;
    tip.style.top = `${y + 18 + box.height > innerHeight ? y - box.height - 10 : y + 18}px`;
  };
  const hide = () => { tip.hidden = true; };

  document.addEventListener("pointermove", (event) => {
    const at = event.target instanceof Element ? event.target.closest("[data-tip]") : null;
    if (at) show(at.dataset.tip, event.clientX, event.clientY);
    else if (!(event.target instanceof Element && event.target.closest(".plot"))) hide();
  });
  document.addEventListener("pointerleave", hide);

  // Charts are drawn from their values, and again with a log scale or smoothing.
  const controls = document.querySelector(".controls");
  const log = document.getElementById("log");
  const smooth = document.getElementById("smooth");
  const charts = [];

  // Exponential moving average without the bias of its start, as of Adam's moments (Kingma and Ba 2015).
  const smoothed = (values, weight) => {
    let sum = 0, norm = 0;
    return values.map((value) => {
      sum = weight * sum + (1 - weight) * value;
      norm = weight * norm + (1 - weight);
      return sum / norm;
    });
  };
  const grouped = (value) => {
    const text = String(Number(value.toPrecision(4)));
    return /^-?\d{5,}$/.test(text) ? text.replace(/\B(?=(\d{3})+$)/g, "\u202f") : text;
  };
  const multiples = (low, high) => {
    const raw = (high - low) / 5, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw * (1 - 1e-9));
    const found = [];
    for (let at = Math.ceil(low / step); at <= Math.floor(high / step); at++) found.push(at * step);
    return found;
  };
  const ticksOf = (low, high) => {
    if (!log.checked) return multiples(low, high);
    const factors = high - low > 2.5 ? [1] : [1, 2, 5];
    const found = [];
    for (let power = Math.floor(low); power <= Math.ceil(high); power++)
      for (const factor of factors) found.push(factor * 10 ** power);
    const seen = found.filter((value) => Math.log10(value) >= low && Math.log10(value) <= high);
    return seen.length > 2 ? seen : multiples(10 ** low, 10 ** high);
  };
  const redraw = ({ data, plot }) => {
    const scale = log.checked ? Math.log10 : (value) => value;
    const weight = Number(smooth.value);
    const line = smoothed(data.v, weight);
    const every = [...data.v, ...data.low, ...data.high, ...[...data.lost, data.other].flat().map((pair) => pair[1])];
    const known = every.map(scale).filter(Number.isFinite);
    if (known.length === 0) return;
    let low = Math.min(...known), high = Math.max(...known);
    const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
    low -= room;
    high += room;
    const y = (value) => 1 - (scale(value) - low) / (high - low);
    const path = (pairs) => pairs.filter(([, value]) => Number.isFinite(scale(value)))
      .map(([x, value], at) => `${at ? "L" : "M"}${1000 * x} ${100 * y(value)}`).join("");
    const pairs = (values) => values.map((value, at) => [data.x[at], value]);
    const set = (kind, d) => plot.querySelectorAll(`path.${kind}`).forEach((found, at) => found.setAttribute("d", d(at)));
    set("curve", () => path(pairs(line)));
    set("raw", () => (weight ? path(pairs(data.v)) : ""));
    set("band", () => path([...pairs(data.high), ...pairs(data.low).reverse()]));
    set("dots", () => pairs(line).filter(([, value]) => Number.isFinite(scale(value)))
      .map(([x, value]) => `M${1000 * x} ${100 * y(value)}h0`).join(""));
    set("lost", (at) => path(data.lost[at]) + (data.lost[at].length === 1 ? "h0" : ""));
    const besides = smoothed(data.other.map((pair) => pair[1]), weight);
    set("other", () => path(data.other.map(([x], at) => [x, besides[at]])));
    data.y = line.map((value) => y(value));
    const drawing = plot.querySelector("svg");
    plot.querySelectorAll(".ytick, path.grid").forEach((old) => old.remove());
    for (const tick of ticksOf(low, high)) {
      const label = document.createElement("span");
      label.className = "ytick";
      label.style.top = `${100 * y(tick)}%`;
      label.textContent = grouped(tick);
      plot.append(label);
      const grid = document.createElementNS("http://www.w3.org/2000/svg", "path");
      grid.setAttribute("class", "grid");
      grid.setAttribute("d", `M0 ${100 * y(tick)}H1000`);
      drawing.prepend(grid);
    }
  };

  for (const chart of document.querySelectorAll("[data-chart]")) {
    const data = JSON.parse(chart.dataset.chart);
    const plot = chart.querySelector(".plot");
    charts.push({ data, plot });
    redraw({ data, plot });
    const pointer = document.createElement("i");
    pointer.className = "pointer";
    pointer.hidden = true;
    plot.append(pointer);
    plot.addEventListener("pointermove", (event) => {
      if (event.target.closest("[data-tip]") || data.x.length === 0) return;
      const box = plot.getBoundingClientRect();
      const x = (event.clientX - box.left) / box.width;
      let best = 0;
      data.x.forEach((at, index) => { if (Math.abs(at - x) < Math.abs(data.x[best] - x)) best = index; });
      pointer.hidden = false;
      pointer.style.left = `${100 * data.x[best]}%`;
      pointer.style.top = `${100 * data.y[best]}%`;
      show(data.t[best], box.left + data.x[best] * box.width, box.top + data.y[best] * box.height);
    });
    plot.addEventListener("pointerleave", () => { pointer.hidden = true; hide(); });
  }
  if (controls) {
    controls.hidden = false;
    for (const control of [log, smooth]) control.addEventListener("input", () => charts.forEach(redraw));
  }
})();
