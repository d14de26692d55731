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
  const svg = (kind, d) => {
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    path.setAttribute("class", kind);
    path.setAttribute("d", d);
    return path;
  };
  const label = (kind, side, part, text) => {
    const span = document.createElement("span");
    span.className = kind;
    span.style[side] = `${100 * part}%`;
    span.textContent = text;
    return span;
  };
  const redraw = ({ data, plot }) => {
    const scale = log.checked ? Math.log10 : (value) => value;
    const weight = Number(smooth.value);
    const smoothedPairs = (pairs) => {
      const values = smoothed(pairs.map((pair) => pair[1]), weight);
      return pairs.map(([batch], at) => [batch, values[at]]);
    };
    const known = [data.values, ...data.lost, data.other].flat().map((pair) => scale(pair[1])).filter(Number.isFinite);
    if (known.length === 0) return;
    let low = Math.min(...known), high = Math.max(...known);
    const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
    low -= room;
    high += room;
    const x = (batch) => batch / Math.max(1, data.last);
    const y = (value) => 1 - (scale(value) - low) / (high - low);
    const path = (pairs) => {
      const seen = pairs.filter(([, value]) => Number.isFinite(scale(value)));
      const d = seen.map(([batch, value], at) => `${at ? "L" : "M"}${1000 * x(batch)} ${100 * y(value)}`).join("");
      return seen.length === 1 ? `${d}h0` : d;
    };
    data.drawn = smoothedPairs(data.values).map(([batch, value]) => [x(batch), y(value)]);
    const paths = [], labels = [label("xname", "right", 0, "batch")];
    for (const tick of ticksOf(low, high)) {
      labels.push(label("ytick", "top", y(tick), grouped(tick)));
      paths.push(svg("grid", `M0 ${100 * y(tick)}H1000`));
    }
    for (const tick of multiples(0, Math.max(1, data.last)).filter(Number.isInteger))
      labels.push(label("xtick", "left", x(tick), grouped(tick)));
    for (const batch of data.resumes) paths.push(svg("resume", `M${1000 * x(batch)} 0V100`));
    for (const pairs of data.lost) paths.push(svg("lost", path(pairs)));
    if (data.other.length) paths.push(svg("other", path(smoothedPairs(data.other))));
    paths.push(svg("raw", weight ? path(data.values) : ""), svg("curve", path(smoothedPairs(data.values))));
    plot.querySelectorAll("span").forEach((old) => old.remove());
    plot.querySelector("svg").replaceChildren(...paths);
    plot.append(...labels);
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
      if (!data.drawn || data.drawn.length === 0) return;
      const box = plot.getBoundingClientRect();
      const at = (event.clientX - box.left) / box.width;
      let best = 0;
      data.drawn.forEach(([x], index) => { if (Math.abs(x - at) < Math.abs(data.drawn[best][0] - at)) best = index; });
      const [x, y] = data.drawn[best], [batch, value] = data.values[best];
      pointer.hidden = false;
      pointer.style.left = `${100 * x}%`;
      pointer.style.top = `${100 * y}%`;
      show(`batch ${grouped(batch)}: ${grouped(value)}`, box.left + x * box.width, box.top + y * box.height);
    });
    plot.addEventListener("pointerleave", () => { pointer.hidden = true; hide(); });
  }
  if (controls) {
    controls.hidden = false;
    for (const control of [log, smooth]) control.addEventListener("input", () => charts.forEach(redraw));
  }
})();
