// One job: how it stands, why it waits, its curve, its output, and the one thing that can be done to it.

import { call, follow } from "./api.js";
import { Chart } from "./chart.js";
import { find, make, setText } from "./dom.js";
import { amount, count, moment, phaseWord, say, span } from "./text.js";

const OVER = ["Completed", "Failed", "Cancelled"];
const EXPLAIN_MS = 4000;
const LINES_MAX = 1000;
const POINTS = 1000;
const METRICS_FIRST = "mean_return";

export class JobPanel {
  /** close(): the panel was closed; failed(error): something was refused. */
  constructor(uid, on) {
    this.uid = uid;
    this.on = on;
    this.controller = new AbortController();
    this.metric = METRICS_FIRST;
    this.view = null;
    this.explained = null;
    this.build();
  }

  build() {
    this.title = make("h2");
    this.phase = make("span", { class: "phase" });
    this.cancel = make("button", { type: "button", class: "danger", disabled: true, onClick: () => this.ask() }, say("cancel"));
    this.notice = make("p", { role: "status", hidden: true });
    this.callout = make("div", { class: "callout", hidden: true });
    this.facts = make("dl");
    this.names = make("select", { "aria-label": say("metric"), onChange: () => this.show(this.names.value) });
    this.chart = new Chart(say("mean"));
    this.lines = make("pre", { hidden: true, tabindex: "0", role: "log", "aria-label": say("logs") });
    this.noLines = make("p", { class: "why" }, say("noLogs"));
    this.command = make("code");
    const close = make("button", { type: "button", onClick: () => this.on.close() }, say("close"));
    find("job").replaceChildren(
      make("div", { class: "bar" }, this.title, this.phase, this.cancel, close),
      this.notice,
      this.callout,
      make("div", {}, make("div", { class: "bar" }, make("h3", {}, say("metric")), this.names), this.chart.element),
      this.facts,
      make("div", {}, make("h3", {}, say("logs")), this.noLines, this.lines),
      make("div", {}, make("h3", {}, say("command")), this.command),
    );
  }

  async start() {
    try {
      this.show(this.metric);
      this.take(await call(`/v1/jobs/${this.uid}`));
    } catch (error) {
      setText(this.title, error.status === 404 ? say("gone") : error.message);
      this.cancel.disabled = true;
      return;
    }
    const path = `/v1/jobs/${this.uid}`;
    follow(`${path}/metrics/stream`, this.controller.signal, {
      open: (again) => again && this.show(this.metric),
      event: (name, sample) => (name === "metrics" ? this.sample(sample) : this.show(this.metric)),
    });
    follow(`${path}/logs?follow=true&tail=300`, this.controller.signal, {
      open: () => this.lines.replaceChildren(),
      event: (name, block) => name === "lines" && this.block(block),
    });
    this.explain();
    this.timer = setInterval(() => this.explain(), EXPLAIN_MS);
  }

  stop() {
    this.controller.abort();
    clearInterval(this.timer);
  }

  take(view) {
    if (this.view && this.view.status.revision > view.status.revision) return;
    const moved = this.view?.status.phase !== view.status.phase;
    this.view = view;
    const { metadata, status } = view;
    setText(this.title, `${metadata.namespace}/${metadata.name}`);
    setText(this.phase, phaseWord(status.phase));
    this.phase.className = `phase ${status.phase}`;
    this.cancel.disabled = OVER.includes(status.phase);
    setText(this.command, `opentinker describe ${metadata.uid}`);
    this.fillFacts();
    if (moved) this.explain();
    this.fillCallout();
  }

  fillFacts() {
    const { metadata, spec, status } = this.view;
    const { progress } = status;
    const environment = spec.environment?.id ?? spec.environment;
    const steps = count(progress.globalStep) + (progress.totalSteps ? ` ${say("of", { n: count(progress.totalSteps) })}` : "");
    const facts = [
      [say("steps"), steps],
      [say("speed"), progress.envStepsPerS ? count(Math.round(progress.envStepsPerS)) : ""],
      [say("mean"), amount(progress.meanReturn)],
      [say("episodes"), progress.episodes ? count(progress.episodes) : ""],
      [say("eta"), OVER.includes(status.phase) ? "" : span(progress.etaS)],
      [say("checkpoint"), progress.checkpointStep ? say("atStep", { n: count(progress.checkpointStep) }) : ""],
      [say("stop"), status.stopReason],
      [say("model"), status.model ? `${status.model.name} v${status.model.version}` : ""],
      [say("replicas"), `${status.replicasRunning}/${status.replicas}`],
      [say("attempt"), status.attempt || ""],
      [say("nodes"), status.nodes.join(", ")],
      [say("pool"), status.pool],
      [say("algorithm"), spec.algorithm],
      [say("environment"), environment],
      [say("settings"), Object.entries(spec.hyperparameters || {}).map(([name, value]) => `${name}=${JSON.stringify(value)}`).join(", ")],
      [say("age"), moment(status.submittedAt)],
      [say("uid"), metadata.uid],
    ];
    this.facts.replaceChildren(...facts.filter(([, value]) => value !== "" && value !== null && value !== undefined).flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
  }

  fillCallout() {
    const { status } = this.view;
    const waits = ["Pending", "Starting", "Stopping"].includes(status.phase);
    const told = waits && this.explained?.text ? this.explained.text : status.message || status.reason;
    const heading = say(OVER.includes(status.phase) ? "ended" : "why");
    const position = status.phase === "Pending" && this.explained?.position ? say("position", { n: count(this.explained.position) }) : "";
    this.callout.hidden = !told || status.phase === "Running";
    this.callout.className = `callout ${status.phase === "Failed" ? "over-bad" : status.phase === "Completed" ? "over-good" : ""}`;
    const reason = status.reason && status.reason !== told ? ` (${status.reason})` : "";
    this.callout.replaceChildren(make("h3", {}, heading + reason), make("p", {}, told || ""), position ? make("p", { class: "why" }, position) : "");
  }

  async explain() {
    if (!this.view || !["Pending", "Starting", "Stopping"].includes(this.view.status.phase)) return;
    try {
      this.explained = await call(`/v1/jobs/${this.uid}/explain`);
    } catch {
      this.explained = null; // the status still says what was last known
    }
    if (!this.controller.signal.aborted) this.fillCallout();
  }

  async show(metric) {
    this.metric = metric;
    const query = new URLSearchParams({ names: metric, points: POINTS });
    const found = await call(`/v1/jobs/${this.uid}/metrics?${query}`).catch(() => null);
    if (!found || metric !== this.metric || this.controller.signal.aborted) return;
    this.offer(found.names);
    this.chart.set(found.series[metric] || []);
  }

  offer(names) {
    const all = [...new Set([this.metric, METRICS_FIRST, ...names])];
    const known = [...this.names.options].map((option) => option.value);
    if (all.length !== known.length || all.some((name) => !known.includes(name))) {
      this.names.replaceChildren(...all.map((name) => make("option", { value: name }, name)));
    }
    this.names.value = this.metric;
  }

  sample(sample) {
    this.offer(Object.keys(sample.values).sort());
    if (this.metric in sample.values) this.chart.add([sample.globalStep, sample.values[this.metric], sample.attempt, sample.timeMs]);
  }

  block(block) {
    const atEnd = this.lines.scrollHeight - this.lines.scrollTop - this.lines.clientHeight < 40;
    this.noLines.hidden = true;
    this.lines.hidden = false;
    if (block.dropped) this.lines.append(make("span", { class: "who" }, `${say("dropped", { n: count(block.dropped) })}\n`));
    for (const text of block.lines) {
      const kind = block.stream === "stderr" ? "stderr" : "";
      this.lines.append(make("span", { class: kind }, make("span", { class: "who" }, `[${block.attempt}.${block.replicaRank}] `), `${text}\n`));
    }
    while (this.lines.childElementCount > LINES_MAX) this.lines.firstElementChild.remove();
    if (atEnd) this.lines.scrollTop = this.lines.scrollHeight;
  }

  ask() {
    const dialog = find("confirm");
    setText(find("confirm-title"), say("cancelTitle", { name: this.view.metadata.name }));
    setText(find("confirm-text"), say("cancelText"));
    setText(find("confirm-no"), say("keep"));
    setText(find("confirm-yes"), say("cancel"));
    find("confirm-no").onclick = () => dialog.close();
    find("confirm-yes").onclick = () => {
      dialog.close();
      this.doCancel();
    };
    dialog.showModal();
  }

  async doCancel() {
    this.cancel.disabled = true;
    try {
      this.take(await call(`/v1/jobs/${this.uid}/cancel`, { method: "POST" }));
      this.notice.className = "";
      setText(this.notice, say("cancelled"));
      this.cancel.disabled = true; // until the next change says otherwise
    } catch (error) {
      this.notice.className = "bad";
      setText(this.notice, say("failed", { text: error.message }));
      this.cancel.disabled = false;
    }
    this.notice.hidden = false;
  }
}
