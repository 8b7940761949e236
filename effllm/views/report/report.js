"use strict";
// A cursor for each chart: the pointer or the slider chooses an iteration, and the values at it are shown. The numbers
// of the page do not need this script.
(() => {
  const data = JSON.parse(document.getElementById("effllm-data").textContent);
  // Returns the index of the point nearest to x; after a restart the iterations go back, so all points are searched.
  const nearest = (xs, ys, x) => {
    let best = -1;
    for (let at = 0; at < xs.length; at++) {
      if (ys[at] !== null && (best < 0 || Math.abs(xs[at] - x) <= Math.abs(xs[best] - x))) best = at;
    }
    return best;
  };
  const readable = (value) =>
    Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));

  for (const plot of document.querySelectorAll(".plot")) {
    const chart = data.charts[Number(plot.dataset.chart)];
    const [first, last] = chart.x;
    const canvas = plot.querySelector(".canvas");
    const cursor = plot.querySelector(".cursor");
    const slider = plot.querySelector("input");
    const output = plot.querySelector("output");

    const show = (share) => {
      const x = first + share * (last - first);
      const parts = chart.lines.map((line) => {
        const [xs, ys] = data.runs[line.run].curves[line.tag];
        const at = nearest(xs, ys, x);
        return at < 0 ? "" : `${line.label} ${readable(ys[at] * line.factor)} (at ${xs[at].toLocaleString("en")})`;
      });
      cursor.setAttribute("d", `M${1000 * share} 0V300`);
      output.textContent = `${chart.over} ${Math.round(x).toLocaleString("en")}: ${parts.filter(Boolean).join(" · ")}`;
    };
    const move = (event) => {
      const box = canvas.getBoundingClientRect();
      const share = Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1);
      slider.value = String(Math.round(1000 * share));
      show(share);
    };
    slider.parentElement.hidden = false;
    slider.addEventListener("input", () => show(Number(slider.value) / 1000));
    canvas.addEventListener("pointermove", move);
    canvas.addEventListener("pointerdown", move);
  }

  // The whole name of a box of an icicle, also of one without room for it.
  for (const icicle of document.querySelectorAll(".icicle")) {
    const output = icicle.querySelector("output");
    for (const box of icicle.querySelectorAll("g")) {
      const show = () => { output.textContent = box.getAttribute("aria-label"); };
      box.addEventListener("focus", show);
      box.addEventListener("pointerenter", show);
    }
  }

  // A print has everything open.
  const closed = [];
  addEventListener("beforeprint", () => {
    for (const one of document.querySelectorAll("details:not([open])")) {
      one.open = true;
      closed.push(one);
    }
  });
  addEventListener("afterprint", () => {
    for (const one of closed.splice(0)) one.open = false;
  });
})();
