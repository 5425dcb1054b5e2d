// The panel "Train": choose settings, start, follow, stop and resume jobs.

import { get, post } from "./api.js";
import { make, toast } from "./dialogs.js";
import { keep, kept } from "./first.js";

const RECIPES = {
  plan: "Planned from the data", tiny: "Trial: seconds, coarse", demo: "Small: a few minutes", fast: "Standard", paper: "As published: hours",
};
const PHASES = { preparing: "Prepare", training: "Train", finishing: "Finish", predicting: "Predict" };
const remembered = (key, otherwise) => kept(key) ?? otherwise;

export function clock(seconds) {
  if (seconds < 90) return `${Math.max(1, Math.round(seconds))} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

export class Learn {
  constructor(box, context) {
    this.context = context; // picture, current() -> case, all() -> cases, flush(), predicted(cases)
    this.job = null;
    this.runs = [];
    this.seen = 0;
    this.recipe = make("select", { id: "recipe" });
    this.method = make("select", { id: "method" });
    this.minutes = make("input", { id: "minutes", type: "number", min: 0.1, step: "any", placeholder: "5, or as the recipe says", value: remembered("minutes", "") });
    this.warm = make("input", { id: "warm", type: "checkbox", checked: remembered("warm", "yes") === "yes" });
    this.startButton = make("button", { id: "train", className: "main", onclick: () => this.train() }, "Train on my strokes");
    this.predictOne = make("button", { id: "predict", onclick: () => this.predict([context.current()]) }, "Predict this");
    this.predictAll = make("button", { id: "predict-all", onclick: () => this.predict(context.all()) }, "Predict all");
    this.state = make("div", { className: "fields", id: "job" });
    const more = make("details", {}, make("summary", {}, "Settings"), make("div", { className: "fields" },
      make("label", {}, "Recipe", this.recipe), make("label", {}, "Minutes", this.minutes), make("label", {}, "Method", this.method),
      make("label", { className: "check", title: "Start from the weights of the newest finished training with this recipe and method; otherwise from scratch" },
        this.warm, "Start from the last model")));
    more.className = "settings";
    box.append(make("div", { className: "fields" }, this.startButton, more, this.state,
      make("div", { className: "row" }, this.predictOne, this.predictAll)));
    this.choices();
    this.refresh();
  }

  async choices() {
    try {
      const { methods, recipes } = await get("jobs/choices");
      const order = ["plan", "tiny", "demo", "fast", "paper"].filter((r) => recipes.includes(r));
      this.recipe.replaceChildren(...order.map((r) => new Option(RECIPES[r], r)));
      this.recipe.value = remembered("recipe", order[0]);
      this.method.replaceChildren(...methods.map((m) => Object.assign(new Option(m.name === "pclmix" ? "pclmix (recommended)" : m.name, m.name), { title: m.summary })));
      this.method.value = remembered("method", "pclmix");
      if (!this.method.value) this.method.value = methods[0]?.name;
      if (!this.recipe.value) this.recipe.value = order[0];
    } catch (error) { toast(error.message, true); }
  }

  async refresh() {
    try {
      const found = await get("jobs");
      this.runs = found.runs;
      this.show(found.job);
    } catch (error) { toast(error.message, true); }
  }

  get running() { return this.job && ["running", "stopping"].includes(this.job.status); }

  async train() {
    // The choices are empty until the server has loaded its methods, which takes seconds after its start.
    const [recipe, method] = [this.recipe.value || remembered("recipe", "plan"), this.method.value || remembered("method", "pclmix")];
    const minutes = parseFloat(this.minutes.value), warm = this.warm.checked;
    const chosen = { recipe, method, minutes: this.minutes.value, warm: warm ? "yes" : "no" };
    for (const [key, value] of Object.entries(chosen)) keep(key, value);
    await this.act("jobs/train", { recipe, method, minutes: minutes > 0 ? minutes : null, then: [this.context.current()].filter(Boolean), warm });
  }

  predict(cases) { return this.act("jobs/predict", { run: this.runs[0]?.id ?? "", cases: cases.filter(Boolean) }); }

  async act(path, body) {
    try {
      await this.context.flush();
      await post(path, body);
      await this.refresh();
    } catch (error) { toast(error.message, true); }
  }

  enable() {
    this.startButton.disabled = this.running || !this.context.all().length;
    this.predictOne.disabled = this.predictAll.disabled = this.running || !this.runs.length;
  }

  show(job) {
    const before = this.job;
    this.job = job;
    this.enable();
    this.startButton.textContent = this.running && job.kind === "train" ? "Training…" : "Train on my strokes";
    this.render();
    if (!job) return;
    if (before?.id !== job.id) this.seen = before ? 0 : job.cases.length;
    if (job.cases.length > this.seen) { this.context.predicted(job.cases.slice(this.seen)); this.seen = job.cases.length; }
    const ended = before && before.id === job.id && ["running", "stopping"].includes(before.status) && !this.running;
    if (ended) {
      get("jobs").then((found) => { this.runs = found.runs; this.enable(); }).catch((error) => toast(error.message, true));
      if (job.status === "finished") toast(job.kind === "train" ? "Training has finished." : "Prediction has finished.");
    }
  }

  render() {
    const job = this.job;
    if (!job) {
      this.state.replaceChildren(make("p", { className: "faint" }, `Draw strokes of every class in a few ${this.context.picture ? "images" : "slices"}, then train.`));
      return;
    }
    const parts = [make("p", { id: "job-text" }, this.words(job))];
    if (this.running && job.kind === "train") parts.push(this.steps(job));
    if (this.running) {
      const share = { training: job.share, predicting: job.done / Math.max(1, job.total) }[job.phase];
      const bar = make("progress", { max: 1 }); // indeterminate without a value
      if (share !== undefined && job.status === "running") bar.value = share;
      bar.setAttribute("aria-label", this.words(job));
      parts.push(bar);
    }
    if (job.curve?.length > 1) parts.push(curve(job.curve));
    if (job.status === "failed") parts.push(make("p", { className: "message" }, job.message));
    const buttons = [], focused = document.activeElement?.id;
    if (this.running)
      buttons.push(make("button", { id: "stop", onclick: () => this.act("jobs/stop", {}) }, job.status === "stopping" ? "Stop now" : "Stop"));
    if (job.resumable) buttons.push(make("button", { id: "resume", onclick: () => this.act("jobs/resume", { id: job.id }) }, "Resume"));
    if (buttons.length) parts.push(make("div", { className: "row" }, ...buttons));
    this.state.replaceChildren(...parts);
    if (["stop", "resume"].includes(focused)) document.getElementById(focused)?.focus();
  }

  // The phases of a training with the current one marked; each phase has its own progress bar.
  steps(job) {
    const names = Object.keys(PHASES).filter((phase) => phase !== "predicting" || job.then), at = names.indexOf(job.phase);
    return make("ol", { className: "steps" }, ...names.map((phase, i) => {
      const item = make("li", { className: i < at ? "over" : "" }, PHASES[phase]);
      if (i === at) item.setAttribute("aria-current", "step");
      return item;
    }));
  }

  words(job) {
    if (job.status === "stopping") return "Saving and stopping…";
    if (job.status === "running") {
      const from = job.start ? " from the last model" : "";
      if (job.phase === "training") return `Training${from}: ${Math.floor(job.share * 100)} %` + (job.left ? `, about ${clock(job.left)} left` : "");
      if (job.phase === "predicting") return `Predicting: ${job.done} of ${job.total}`;
      if (job.phase === "finishing") return "Finishing: saving the model, checking it on your strokes…";
      return "Preparing: reading images and strokes…";
    }
    const what = job.kind === "train" ? "Training" : "Prediction";
    return { finished: `${what} finished.`, stopped: `${what} stopped.`, failed: `${what} failed.` }[job.status];
  }
}

// The loss over steps, smoothed with a moving average.
function curve(points) {
  const box = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  box.setAttribute("class", "curve");
  box.setAttribute("viewBox", "0 0 200 60");
  box.setAttribute("preserveAspectRatio", "none");
  box.setAttribute("role", "img");
  box.setAttribute("aria-label", `Training loss, currently ${points.at(-1)[1]}`);
  const reach = Math.floor(points.length / 40);
  const values = points.map((_, i) => {
    const near = points.slice(Math.max(0, i - reach), i + reach + 1);
    return near.reduce((sum, [, loss]) => sum + loss, 0) / near.length;
  });
  const low = Math.min(...values), high = Math.max(...values), first = points[0][0], last = points.at(-1)[0];
  const line = points.map(([step], i) => {
    const x = ((step - first) / Math.max(1, last - first)) * 196 + 2;
    return `${x.toFixed(1)},${(56 - ((values[i] - low) / Math.max(1e-6, high - low)) * 50).toFixed(1)}`;
  });
  const path = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  const style = { points: line.join(" "), fill: "none", stroke: "currentColor", "stroke-width": "1.6", "vector-effect": "non-scaling-stroke" };
  for (const [key, value] of Object.entries(style)) path.setAttribute(key, value);
  const title = document.createElementNS("http://www.w3.org/2000/svg", "title");
  title.textContent = "Training loss: should decrease";
  box.append(title, path);
  return box;
}
