// Elements from values. Foreign text only ever becomes a text node or an attribute that cannot run: there is no innerHTML on this page.

export const find = (id) => document.getElementById(id);

/** An element: attributes by name, `onClick`-like listeners, children as nodes or text. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2).toLowerCase(), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, String(value));
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== false).map((child) => (child instanceof Node ? child : String(child))));
  return element;
}

export function shape(tag, attributes = {}, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  if (text) element.textContent = text;
  return element;
}

/** Sets text only if it differs, so that selections and screen readers are left in peace. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
