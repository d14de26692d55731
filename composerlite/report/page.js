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

  for (const chart of document.querySelectorAll("[data-chart]")) {
    const data = JSON.parse(chart.dataset.chart);
    const plot = chart.querySelector(".plot");
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
})();
