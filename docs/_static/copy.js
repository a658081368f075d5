// A button on each code block that copies its text, comments and prompts too; and places in long names of tables where a narrow
// screen may break them.
document.addEventListener("DOMContentLoaded", () => {
  for (const name of document.querySelectorAll("table.docutils code .pre")) {
    name.replaceChildren(...name.textContent.split(/(?<=_)/).flatMap((part) => [part, document.createElement("wbr")]));
  }
  for (const block of document.querySelectorAll("div.highlight")) {
    const button = document.createElement("button");
    button.className = "copy-code";
    button.textContent = "copy";
    button.setAttribute("aria-label", "copy this code");
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(block.querySelector("pre").innerText.trimEnd());
      button.textContent = "copied";
      setTimeout(() => (button.textContent = "copy"), 1500);
    });
    block.append(button);
  }
});
