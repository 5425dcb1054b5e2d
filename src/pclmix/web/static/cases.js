// The list of cases: progress, filter, sort order, next and previous.

import { caseUrl } from "./api.js";
import { make } from "./dialogs.js";

const $ = (id) => document.getElementById(id);

export class CaseList {
  constructor(dataset, open) {
    this.classes = dataset.classes;
    this.open = open;
    this.progress = {};
    this.rows = new Map();
    this.pictures = new Map();
    this.waiting = [];
    this.current = null;
    this.replace(dataset.cases);
    for (const id of ["filter", "show", "sort"]) $(id).addEventListener("input", () => this.render());
    $("previous").onclick = () => this.step(-1);
    $("next").onclick = () => this.step(1);
  }

  replace(cases) {
    this.cases = cases;
    this.byName = new Map(cases.map((c) => [c.name, c]));
  }

  setProgress(progress) { Object.assign(this.progress, progress); this.render(); this.showPictures(); }

  // Fraction of slices with strokes.
  drawn(name) { const p = this.progress[name]; return p && p.slices ? p.touched / p.slices : 0; }

  visible() {
    const text = $("filter").value.trim().toLowerCase(), show = $("show").value, sort = $("sort").value;
    const keep = {
      all: () => true,
      empty: (c) => this.drawn(c.name) === 0,
      drawn: (c) => this.drawn(c.name) > 0,
      predicted: (c) => c.predictions.length > 0,
      problem: (c) => Boolean(this.progress[c.name]?.problem),
    }[show];
    const certainty = (c) => c.predictions[0]?.certainty ?? 2;
    const order = {
      name: (a, b) => a.name.localeCompare(b.name, undefined, { numeric: true }),
      least: (a, b) => this.drawn(a.name) - this.drawn(b.name),
      most: (a, b) => this.drawn(b.name) - this.drawn(a.name),
      worst: (a, b) => certainty(a) - certainty(b),
    };
    return this.cases
      .filter((c) => keep(c) && c.name.toLowerCase().includes(text))
      .sort((a, b) => order[sort](a, b) || order.name(a, b));
  }

  step(by) {
    const names = this.visible().map((c) => c.name), at = names.indexOf(this.current);
    const next = names[at < 0 ? 0 : at + by];
    if (next) this.open(next);
  }

  select(name) {
    this.current = name;
    $("case-name").textContent = name ?? "";
    this.render();
    $("cases").querySelector("[aria-current=true]")?.scrollIntoView({ block: "nearest" });
  }

  render() {
    const list = $("cases"), rows = this.visible().map((c) => this.known(c));
    // Unchanged rows stay in place: replacing a row between press and release would lose the click.
    if (rows.length !== list.children.length || rows.some((row, i) => row !== list.children[i])) list.replaceChildren(...rows);
    const drawn = this.cases.filter((c) => this.drawn(c.name) > 0).length;
    const predicted = this.cases.filter((c) => c.predictions.length).length;
    $("totals").textContent = `${this.cases.length} case${this.cases.length === 1 ? "" : "s"} · ${drawn} drawn · ${predicted} predicted`;
  }

  known(c) {
    const key = JSON.stringify([this.progress[c.name], c.predictions[0]?.certainty, c.name === this.current]);
    const before = this.rows.get(c.name);
    if (before?.key === key) return before.row;
    const row = this.row(c);
    this.rows.set(c.name, { key, row });
    return row;
  }

  row(c) {
    const p = this.progress[c.name], certainty = c.predictions[0]?.certainty, about = [];
    const meter = make("span", { className: "meter" });
    const button = make("button", { title: c.name, onclick: () => this.open(c.name) }, this.picture(c.name), make("b", {}, c.name), meter);
    button.setAttribute("aria-current", String(c.name === this.current));
    if (p && p.size) {
      this.classes.forEach((k, i) => {
        const share = p.voxels[i] / p.size; // square root: strokes cover fractions of a percent
        const fill = make("u");
        fill.style.width = `${Math.min(100, Math.sqrt(share * 20) * 100)}%`;
        fill.style.background = k.colour;
        meter.append(make("i", { title: `${k.name}: ${(share * 100).toPrecision(2)} % of the image drawn` }, fill));
      });
      if (p.slices > 1) about.push(`${p.touched}/${p.slices} slices`);
      else about.push(p.touched ? "drawn" : "no strokes");
    }
    if (certainty !== undefined) about.push(`${Math.round(certainty * 100)} % certain`);
    button.append(make("span", { className: "about" }, about.join(" · ")));
    if (p?.problem) button.append(make("span", { className: "problem" }, p.problem));
    return make("li", {}, button);
  }

  // Created once per case and reused when its row is rendered again.
  picture(name) {
    if (!this.pictures.has(name)) {
      const picture = make("img", { className: "thumb", alt: "", loading: "lazy", decoding: "async", fetchPriority: "low" });
      picture.onerror = () => { picture.removeAttribute("src"); };
      this.pictures.set(name, picture);
      this.waiting.push([picture, `/api/${caseUrl(name, "thumbnail")}`]);
    }
    return this.pictures.get(name);
  }

  // Thumbnails are requested after the first image, which has priority.
  showPictures() {
    for (const [picture, source] of this.waiting.splice(0)) picture.src = source;
  }
}
