"use strict";
// Shows the values of a chart under the pointer, and copies the command. The page works without it.
// Names from the data are written by textContent only, so that none can become markup.
(() => {
  const charts = JSON.parse(document.getElementById("data").textContent);

  // Numbers as text, as number_format.py writes them.
  const formatNumber = (value) => {
    const size = Math.abs(value);
    if (value !== 0 && (size < 1e-4 || size >= 1e7)) {
      return value.toExponential(2).replace("e+", "e");
    }
    return value.toLocaleString("en", { maximumSignificantDigits: size >= 1000 ? 6 : 4 });
  };
  const formatPercent = (value) => (value * 100).toFixed(2) + " %";
  const formatLossScale = (value) => {
    const exponent = Math.log2(value);
    if (!(value > 0) || !Number.isInteger(exponent) || Math.abs(exponent) < 4) {
      return formatNumber(value);
    }
    const digits = [...String(Math.abs(exponent))].map((digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]);
    return "2" + (exponent < 0 ? "⁻" : "") + digits.join("");
  };
  const formatters = { number: formatNumber, percent: formatPercent, scale: formatLossScale };
  const formatValue = (kind, value) => formatters[kind](value).replace("-", "−");

  const createElement = (tag, className, text) => {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  };

  // Where a value lies on an axis: 0 at its low end, 1 at its high end.
  const fractionOf = ([low, high, log], value) => {
    if (log) return Math.log(value / low) / Math.log(high / low);
    return (value - low) / (high - low);
  };

  // Whether the line's box in the legend is checked; a chart of one line has no legend.
  const isShown = (line) => {
    const box = document.querySelector(`[data-show="${line.i}"]`);
    return !box || box.checked;
  };

  function addReadOut(plot) {
    const chart = charts[plot.dataset.chart];
    if (!chart) return;
    const overlay = createElement("div");
    const tip = createElement("div", "tip");
    tip.setAttribute("role", "status");
    tip.hidden = true;
    plot.append(overlay, tip);
    plot.tabIndex = 0;
    plot.setAttribute("role", "group");
    plot.setAttribute("aria-label", `Values by ${chart.name}: move with the arrow keys`);
    let position = -1;  // index into chart.x; -1 while nothing is shown

    const hide = () => {
      position = -1;
      tip.hidden = true;
      overlay.replaceChildren();
    };

    const show = (index) => {
      position = Math.max(0, Math.min(chart.x.length - 1, index));
      const x = fractionOf(chart.xs, chart.x[position]);

      // A vertical line at this place of the x axis.
      const hair = createElement("div", "hair");
      hair.style.left = x * 100 + "%";
      overlay.replaceChildren(hair);

      // For each line: its colour, name, value and range in the list, and a spot in the drawing.
      const list = createElement("div");
      for (const line of chart.lines.filter(isShown)) {
        const value = line.mid[position];
        if (value === null) continue;
        const colour = `s${line.i % 8}`;
        list.append(
          createElement("span", `key ${colour}`),
          createElement("bdi", "", line.name),
          createElement("span", "", formatValue(chart.kind, value)),
        );
        if (line.lo && line.lo[position] !== line.hi[position]) {
          const low = formatValue(chart.kind, line.lo[position]);
          const high = formatValue(chart.kind, line.hi[position]);
          list.append(createElement("i", "", `${low} to ${high}`));
        }
        const y = fractionOf(chart.ys, value);
        if (y < 0 || y > 1) continue;
        const spot = createElement("div", `spot ${colour}`);
        spot.style.left = x * 100 + "%";
        spot.style.bottom = y * 100 + "%";
        overlay.append(spot);
      }

      // The box with the list, on the side of the hair that has more room.
      const number = chart.x[position].toLocaleString("en", { maximumFractionDigits: 0 });
      tip.replaceChildren(createElement("b", "", `${chart.name} ${number}`), list);
      tip.hidden = false;
      tip.style.left = x < 0.5 ? `calc(${x * 100}% + 14px)` : "auto";
      tip.style.right = x < 0.5 ? "auto" : `calc(${(1 - x) * 100}% + 14px)`;
    };

    const nearestIndex = (event) => {
      const box = plot.getBoundingClientRect();
      const [low, high] = chart.xs;
      const value = low + ((event.clientX - box.left) / box.width) * (high - low);
      let nearest = 0;
      chart.x.forEach((x, index) => {
        if (Math.abs(x - value) < Math.abs(chart.x[nearest] - value)) nearest = index;
      });
      return nearest;
    };

    plot.addEventListener("pointermove", (event) => show(nearestIndex(event)));
    plot.addEventListener("pointerdown", (event) => show(nearestIndex(event)));
    plot.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse") hide();
    });
    plot.addEventListener("blur", hide);
    plot.addEventListener("keydown", (event) => {
      const targets = {
        ArrowLeft: position - 1,
        ArrowRight: position + 1,
        Home: 0,
        End: chart.x.length - 1,
      };
      if (event.key === "Escape") hide();
      if (!(event.key in targets)) return;
      event.preventDefault();
      show(targets[event.key]);
    });
  }

  async function copyCommand(button) {
    const code = button.parentElement.querySelector("code");
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch {
      // Not allowed here: select it, so that one key copies it.
      getSelection().selectAllChildren(code);
      document.execCommand("copy");
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1600);
  }

  document.querySelectorAll(".plot").forEach(addReadOut);
  document.querySelectorAll("[data-copy]").forEach((button) => {
    button.hidden = false;
    button.addEventListener("click", () => copyCommand(button));
  });

  // On paper nothing can be unfolded.
  addEventListener("beforeprint", () => {
    document.querySelectorAll("section > details").forEach((details) => { details.open = true; });
  });
})();
