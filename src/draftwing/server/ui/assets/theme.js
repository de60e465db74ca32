// The page's colours: the system's, light, or dark. This is no module: it runs before anything is drawn.

{
  const NAME = "draftwing-theme";
  const set = (theme) => {
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
  };
  const kept = () => {
    try {
      return localStorage.getItem(NAME) ?? "";
    } catch {
      return ""; // forbidden: the system's
    }
  };
  set(kept());
  addEventListener("storage", ({ key, newValue }) => { if (key === NAME) set(newValue); });
  addEventListener("DOMContentLoaded", () => {
    const choice = document.getElementById("theme");
    choice.value = document.documentElement.dataset.theme ?? "";
    choice.addEventListener("change", () => {
      set(choice.value);
      try {
        localStorage.setItem(NAME, choice.value);
      } catch {
        // it lasts as long as the page
      }
    });
  });
}
