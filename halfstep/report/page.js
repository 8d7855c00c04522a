"use strict";
// Reads values out under the pointer, and copies the command. Names go in by textContent only.
(() => {
  const charts = JSON.parse(document.getElementById("data").textContent);
  const up = "⁰¹²³⁴⁵⁶⁷⁸⁹";

  const make = (tag, cls, text) => {
    const made = document.createElement(tag);
    if (cls) made.className = cls;
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const number = (v) => {
    const size = Math.abs(v);
    if (v !== 0 && (size < 1e-4 || size >= 1e7)) return v.toExponential(2).replace("e+", "e");
    return v.toLocaleString("en", { maximumSignificantDigits: size >= 1000 ? 6 : 4 });
  };
  const power = (v) => {
    const exponent = Math.log2(v);
    if (!(v > 0) || !Number.isInteger(exponent) || Math.abs(exponent) < 4) return number(v);
    return "2" + (exponent < 0 ? "⁻" : "") + [...String(Math.abs(exponent))].map((d) => up[d]).join("");
  };
  const kinds = { number, percent: (v) => (v * 100).toFixed(2) + " %", scale: power };
  const write = (kind, v) => kinds[kind](v).replace("-", "−");
  const place = ([lo, hi, log], v) => (log ? Math.log(v / lo) / Math.log(hi / lo) : (v - lo) / (hi - lo));
  const shown = (line) => {
    const box = document.querySelector(`[data-show="${line.i}"]`);
    return !box || box.checked;
  };

  function respond(plot) {
    const chart = charts[plot.dataset.chart];
    if (!chart) return;
    const over = make("div");
    const tip = make("div", "tip");
    tip.setAttribute("role", "status");
    tip.hidden = true;
    plot.append(over, tip);
    plot.tabIndex = 0;
    plot.setAttribute("role", "group");
    plot.setAttribute("aria-label", "Values by " + chart.name + ": move with the arrow keys");
    let at = -1;

    const hide = () => {
      at = -1;
      tip.hidden = true;
      over.replaceChildren();
    };
    const show = (i) => {
      at = Math.max(0, Math.min(chart.x.length - 1, i));
      const x = place(chart.xs, chart.x[at]);
      const hair = make("div", "hair");
      hair.style.left = x * 100 + "%";
      over.replaceChildren(hair);
      const list = make("div");
      for (const line of chart.lines.filter(shown)) {
        const value = line.mid[at];
        if (value === null) continue;
        list.append(make("span", `key s${line.i % 8}`), make("bdi", "", line.name), make("span", "", write(chart.kind, value)));
        if (line.lo && line.lo[at] !== line.hi[at]) {
          list.append(make("i", "", write(chart.kind, line.lo[at]) + " to " + write(chart.kind, line.hi[at])));
        }
        const y = place(chart.ys, value);
        if (y < 0 || y > 1) continue;
        const spot = make("div", `spot s${line.i % 8}`);
        spot.style.left = x * 100 + "%";
        spot.style.bottom = y * 100 + "%";
        over.append(spot);
      }
      tip.replaceChildren(make("b", "", chart.name + " " + chart.x[at].toLocaleString("en", { maximumFractionDigits: 0 })), list);
      tip.hidden = false;
      tip.style.left = x < 0.5 ? `calc(${x * 100}% + 14px)` : "auto";
      tip.style.right = x < 0.5 ? "auto" : `calc(${(1 - x) * 100}% + 14px)`;
    };
    const nearest = (event) => {
      const box = plot.getBoundingClientRect();
      const value = chart.xs[0] + ((event.clientX - box.left) / box.width) * (chart.xs[1] - chart.xs[0]);
      let best = 0;
      chart.x.forEach((x, i) => { if (Math.abs(x - value) < Math.abs(chart.x[best] - value)) best = i; });
      return best;
    };
    plot.addEventListener("pointermove", (event) => show(nearest(event)));
    plot.addEventListener("pointerdown", (event) => show(nearest(event)));
    plot.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") hide(); });
    plot.addEventListener("blur", hide);
    plot.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: chart.x.length - 1 };
      if (event.key === "Escape") hide();
      if (!(event.key in moves)) return;
      event.preventDefault();
      show(moves[event.key]);
    });
  }

  async function copy(button) {
    const code = button.parentElement.querySelector("code");
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch {
      getSelection().selectAllChildren(code);  // not allowed here: select it, so that one key copies it
      document.execCommand("copy");
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1600);
  }

  document.querySelectorAll(".plot").forEach(respond);
  document.querySelectorAll("[data-copy]").forEach((button) => {
    button.hidden = false;
    button.addEventListener("click", () => copy(button));
  });
  addEventListener("beforeprint", () => document.querySelectorAll("section > details").forEach((each) => { each.open = true; }));
})();
