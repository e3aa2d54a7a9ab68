(() => {
  "use strict";
  const source = document.getElementById("chart-data").textContent;
  const darkByLight = JSON.parse(document.getElementById("dark-colours").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const PRINTED_WIDTH = 676;
  const HALF_WIDTH = 312;

  const charts = (isDark) =>
    JSON.parse(isDark ? source.replace(/#[0-9a-f]{6}/g, (hex) => darkByLight[hex] || hex) : source);

  const config = {
    responsive: true,
    displaylogo: false,
    displayModeBar: false,
    doubleClick: "reset",
  };

  const draw = (isDark, widthOf) => {
    for (const chart of charts(isDark)) {
      const place = document.getElementById("chart-" + chart.key);
      const layout = chart.figure.layout;
      layout.height = chart.height;
      if (widthOf) layout.width = widthOf(place);
      if (!chart.zooms) {
        layout.dragmode = false;
        layout.xaxis = { ...layout.xaxis, fixedrange: true };
        layout.yaxis = { ...layout.yaxis, fixedrange: true };
      }
      Plotly.react(place, chart.figure.data, layout, config);
    }
  };

  draw(dark.matches);
  dark.addEventListener("change", () => draw(dark.matches));
  window.addEventListener("beforeprint", () => {
    draw(false, (place) => (place.closest(".pair, .grid") ? HALF_WIDTH : PRINTED_WIDTH));
  });
  window.addEventListener("afterprint", () => draw(dark.matches));
})();
