// The list: one page from the gateway, then changes as they come. Rows are kept and updated, never rebuilt as a whole.

import { call, follow, Problem } from "./api.js";
import { find, make, setText } from "./dom.js";
import { amount, count, moment, phaseWord, say } from "./text.js";

const PAGE = 100;
const PAINT_MS = 250; // changes in between are painted together
const PHASES = ["Pending", "Starting", "Running", "Stopping", "Completed", "Failed", "Cancelled"];
const COLUMNS = [
  ["name", "name"], ["namespace", "extra"], ["phase"], ["replicas", "number replicas"], ["steps", "number steps"], ["speed", "number extra"], ["mean", "number"], ["model", "extra"],
  ["age", "extra"],
];

export class JobList {
  /** heard(): something came; lost(error): nothing comes; open(uid): a row was chosen; changed(view): the chosen job changed. */
  constructor(on) {
    this.on = on;
    this.views = new Map();
    this.rows = new Map();
    this.counts = {};
    this.cursor = null;
    this.chosen = null;
    this.loaded = false;
    this.painting = 0;
    this.controller = null;
    this.fill();
  }

  fill() {
    setText(find("jobs-title"), say("jobs"));
    setText(find("phase-label"), say("phase"));
    setText(find("search-label"), say("search"));
    setText(find("more"), say("more"));
    find("columns").append(...COLUMNS.map(([name, kind]) => make("th", { scope: "col", class: kind }, say(name))));
    find("phase").append(make("option", { value: "" }, say("all")), ...PHASES.map((phase) => make("option", { value: phase }, phaseWord(phase))));
    find("phase").addEventListener("change", () => this.reload());
    find("search").addEventListener("input", () => this.paint());
    find("more").addEventListener("click", () => this.load(this.cursor));
  }

  start() {
    this.stop();
    this.controller = new AbortController();
    this.reload();
    follow("/v1/watch/jobs", this.controller.signal, {
      open: (again) => again && this.reload(),
      alive: () => this.on.heard(),
      lost: (error) => this.on.lost(error),
      event: (name, data) => (name === "job" ? this.take(data) : this.reload()),
    });
  }

  stop() {
    this.controller?.abort();
  }

  async reload() {
    this.views.clear();
    this.cursor = null;
    await this.load(null);
  }

  async load(cursor) {
    const phase = find("phase").value;
    const query = new URLSearchParams({ limit: PAGE, ...(phase ? { phase } : {}), ...(cursor ? { cursor } : {}) });
    if (!this.loaded) setText(find("jobs-state"), say("loading"));
    try {
      const page = await call(`/v1/jobs?${query}`);
      for (const view of page.items) this.keep(view);
      this.cursor = page.cursor;
      this.counts = page.counts;
      this.loaded = true;
      this.error = "";
      this.on.heard();
    } catch (error) {
      if (error instanceof Problem && error.status !== 401) this.error = say("failed", { text: error.message });
      this.on.lost(error);
    }
    this.paint();
  }

  keep(view) {
    const known = this.views.get(view.metadata.uid);
    if (!known || known.status.revision <= view.status.revision) this.views.set(view.metadata.uid, view);
  }

  take(view) {
    const known = this.views.get(view.metadata.uid);
    this.keep(view);
    if (known) this.counts[known.status.phase] = (this.counts[known.status.phase] || 0) - 1;
    this.counts[view.status.phase] = (this.counts[view.status.phase] || 0) + 1;
    if (view.metadata.uid === this.chosen) this.on.changed(view);
    if (!this.painting) this.painting = setTimeout(() => this.paint(), PAINT_MS);
  }

  choose(uid) {
    this.chosen = uid;
    this.paint();
  }

  paint() {
    clearTimeout(this.painting);
    this.painting = 0;
    const phase = find("phase").value;
    const text = find("search").value.trim().toLowerCase();
    const shown = [...this.views.values()]
      .filter((view) => (!phase || view.status.phase === phase) && (!text || `${view.metadata.namespace}/${view.metadata.name} ${view.metadata.uid}`.includes(text)))
      .sort((a, b) => (a.status.submittedAt < b.status.submittedAt ? 1 : a.status.submittedAt > b.status.submittedAt ? -1 : a.metadata.uid < b.metadata.uid ? 1 : -1));
    const wanted = new Set(shown.map((view) => view.metadata.uid));
    for (const [uid, row] of this.rows) {
      if (wanted.has(uid)) continue;
      row.element.remove();
      this.rows.delete(uid);
    }
    let before = find("rows").firstElementChild;
    for (const view of shown) {
      const row = this.row(view);
      if (row.element === before) before = before.nextElementSibling;
      else find("rows").insertBefore(row.element, before);
    }
    this.tell(shown.length);
  }

  tell(shown) {
    const state = this.error ? this.error : !this.loaded ? say("loading") : shown ? "" : this.views.size || find("phase").value ? say("noMatch") : say("empty");
    setText(find("jobs-state"), state);
    find("jobs-state").classList.toggle("bad", Boolean(this.error));
    find("more").hidden = !this.cursor;
    setText(find("counts"), PHASES.filter((phase) => this.counts[phase]).map((phase) => `${phaseWord(phase)}\u00a0${count(this.counts[phase])}`).join(" · "));
  }

  row(view) {
    const uid = view.metadata.uid;
    let row = this.rows.get(uid);
    if (!row) {
      row = newRow(() => this.on.open(uid));
      this.rows.set(uid, row);
    }
    row.element.setAttribute("aria-current", String(uid === this.chosen));
    if (row.view !== view) fillRow(row, view);
    return row;
  }
}

function newRow(open) {
  const cells = COLUMNS.map(([name, kind]) => make("td", { class: kind, "data-label": say(name) }));
  const button = make("button", { type: "button" });
  const phase = make("span", { class: "phase" });
  const why = make("div", { class: "why" });
  cells[0].append(button, why);
  cells[2].append(phase);
  return { element: make("tr", { onClick: open }, ...cells), cells, button, phase, why, view: null };
}

function fillRow(row, view) {
  const { metadata, status } = view;
  row.view = view;
  setText(row.button, metadata.name);
  setText(row.cells[1], metadata.namespace);
  setText(row.phase, phaseWord(status.phase));
  row.phase.className = `phase ${PHASES.includes(status.phase) ? status.phase : ""}`;
  setText(row.why, ["Pending", "Failed", "Stopping", "Cancelled"].includes(status.phase) ? status.message || status.reason : "");
  setText(row.cells[3], ["Completed", "Failed", "Cancelled"].includes(status.phase) ? "" : `${status.replicasRunning}/${status.replicas}`);
  setText(row.cells[4], status.progress.globalStep ? count(status.progress.globalStep) : "");
  setText(row.cells[5], status.phase === "Running" && status.progress.envStepsPerS ? count(Math.round(status.progress.envStepsPerS)) : "");
  setText(row.cells[6], amount(status.progress.meanReturn));
  setText(row.cells[7], status.model ? `${status.model.name} v${status.model.version}` : "");
  setText(row.cells[8], moment(status.submittedAt));
}
