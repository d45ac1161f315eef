// Names and focus for what the theme's own script makes: wide tables that scroll, the buttons of code, navigation.
addEventListener("load", () => {
  for (const table of document.querySelectorAll(".md-typeset__scrollwrap")) table.tabIndex = 0;
  document.querySelectorAll(".md-code__nav").forEach((nav, place) => nav.setAttribute("aria-label", `Code ${place + 1}`));
  document.querySelectorAll(".md-nav[aria-labelledby]").forEach((nav, place) => {
    const label = document.getElementById(nav.getAttribute("aria-labelledby"))?.textContent.trim() ?? "";
    nav.removeAttribute("aria-labelledby");
    nav.setAttribute("aria-label", `${label} ${place + 1}`);
  });
});
