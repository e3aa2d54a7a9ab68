(() => {
  "use strict";
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const darkByLight = JSON.parse(document.getElementById("dark-colours").textContent);
  const source = document.getElementById("chart-data").textContent;
  const PRINTED_WIDTH = 676;
  const HALF_WIDTH = 312;
  const config = { responsive: true, displaylogo: false, displayModeBar: false, doubleClick: "reset" };
  const chosen = new Map();

  // The library travels compressed; the content policy lets the unpacked text run because it knows its digest.
  const unpack = async () => {
    const packed = document.getElementById("plotly");
    const bytes = Uint8Array.from(atob(packed.textContent.trim()), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
    packed.remove();
  };

  const charts = (isDark) =>
    JSON.parse(isDark ? source.replace(/#[0-9a-f]{6}/g, (hex) => darkByLight[hex] || hex) : source);

  const shown = (chart) => {
    const index = chosen.get(chart.key) || 0;
    return index ? chart.variants[index] : chart;
  };

  const drawOne = (chart, widthOf) => {
    const place = document.getElementById("chart-" + chart.key);
    const { figure, height } = shown(chart);
    const layout = figure.layout;
    layout.height = height;
    place.style.height = height + "px";
    if (widthOf) layout.width = widthOf(place);
    if (!chart.zooms) {
      layout.dragmode = false;
      layout.xaxis = { ...layout.xaxis, fixedrange: true };
      layout.yaxis = { ...layout.yaxis, fixedrange: true };
    }
    Plotly.react(place, figure.data, layout, config);
  };

  const draw = (isDark, widthOf) => {
    for (const chart of charts(isDark)) drawOne(chart, widthOf);
  };

  const choose = (button) => {
    const group = button.closest(".variants");
    chosen.set(group.dataset.chart, Number(button.dataset.variant));
    for (const other of group.children) other.classList.toggle("chosen", other === button);
    drawOne(charts(dark.matches).find((chart) => chart.key === group.dataset.chart));
  };

  const start = async () => {
    if (typeof DecompressionStream === "undefined") {
      document.getElementById("no-charts").hidden = false;
      return;
    }
    await unpack();
    draw(dark.matches);
    document.documentElement.dataset.charts = "drawn";
    dark.addEventListener("change", () => draw(dark.matches));
    for (const button of document.querySelectorAll(".variants button")) {
      button.addEventListener("click", () => choose(button));
    }
    window.addEventListener("beforeprint", () => {
      const isHalf = (place) => (place.closest(".pair, .grid")?.children.length || 0) > 1;
      draw(false, (place) => (isHalf(place) ? HALF_WIDTH : PRINTED_WIDTH));
    });
    window.addEventListener("afterprint", () => draw(dark.matches));
  };

  start();
})();
