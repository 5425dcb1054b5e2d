// Annotations over the image: orientation letters, crosshair, scale bar, readout of the voxel under the pointer.

const SVG = "http://www.w3.org/2000/svg";
const NAMES = ["Sagittal", "Coronal", "Axial"];
const BAR = 110; // maximum length of the scale bar in pixels
const HOLE = 9; // radius in pixels around the voxel left free by the crosshair
const MARGIN = 16;
const NARROW = 260; // planes narrower than this, in pixels, have no room for their name
const GLYPH = 7.5; // pixels per character of a title, at most

const element = (tag, attributes, text) => {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
};

// A length in mm with the unit that fits.
export const inWords = (mm) => {
  const [factor, unit] = mm >= 10 ? [0.1, "cm"] : mm >= 1 ? [1, "mm"] : [1000, "µm"];
  return `${Number((mm * factor).toPrecision(6))} ${unit}`;
};

export class Hud {
  constructor(svg, readout, viewer, context) {
    Object.assign(this, { svg, readout, viewer, context }); // context: picture, classes, crosshair()
    this.pointer = null;
  }

  draw() {
    const parts = [], { viewer } = this, { picture } = this.context, tiles = viewer.tiles;
    let sides = "";
    for (const [number, plane] of tiles.entries()) {
      const [left, top, width, height] = plane.box, middle = [left + width / 2, top + height / 2];
      if (tiles.length > 1) {
        parts.push(element("rect", { x: left + 0.5, y: top + 0.5, width: width - 1, height: height - 1, class: "tile" }));
        const along = viewer.grid.axis[plane.depth], place = `${viewer.cross[along] + 1} of ${viewer.grid.dims[along]}`;
        const title = width < NARROW ? place : `${viewer.oriented ? NAMES[plane.depth] : "Plane"} ${place}`;
        const lower = 8 + GLYPH * title.length > width / 2 - MARGIN; // below the letter at the top
        parts.push(element("text", { x: left + 8, y: top + (lower ? 44 : 20), class: "note" }, title));
      }
      if (tiles.length > 1 || this.context.crosshair()) parts.push(...this.cross(plane));
      if (!picture && viewer.oriented) {
        const { left: l, right: r, top: t, bottom: b } = plane.letters;
        for (const [letter, x, y] of [[l, left + MARGIN, middle[1]], [r, left + width - MARGIN, middle[1]], [t, middle[0], top + MARGIN], [b, middle[0], top + height - MARGIN]])
          parts.push(element("text", { x, y, class: "side" }, letter));
        if (number === 0) sides = `Sides of the patient: ${l} left, ${r} right, ${t} top, ${b} bottom`;
      }
    }
    // Pictures without a physical size have a spacing of 1.
    if (!(picture && viewer.spacing?.every((s) => s === 1))) for (const plane of tiles) parts.push(...this.bar(plane));
    if (tiles.length) { // at the bottom of the first plane
      const [left, top, width, height] = tiles[0].box;
      this.readout.style.left = `${left + 12}px`;
      this.readout.style.maxWidth = `${width - 24}px`;
      this.readout.style.bottom = `${this.svg.clientHeight - top - height + 40}px`; // above letter and scale bar
    }
    const drawn = sides + parts.map((part) => part.outerHTML).join("");
    if (drawn !== this.drawn) { // painting it anew takes longer than comparing
      this.drawn = drawn;
      this.svg.setAttribute("aria-label", sides || "Image without a known orientation");
      this.svg.replaceChildren(...parts);
    }
    this.read();
  }

  cross(plane) {
    const [left, top, width, height] = plane.box, [x, y] = plane.screen(this.viewer.cross), lines = [];
    const line = (x1, y1, x2, y2) => { if (x2 > x1 || y2 > y1) lines.push(element("line", { x1, y1, x2, y2, class: "cross" })); };
    if (x > left && x < left + width) { line(x, top, x, Math.min(y - HOLE, top + height)); line(x, Math.max(y + HOLE, top), x, top + height); }
    if (y > top && y < top + height) { line(left, y, Math.min(x - HOLE, left + width), y); line(Math.max(x + HOLE, left), y, left + width, y); }
    return lines;
  }

  // Scale bar of 1, 2 or 5 times a power of ten mm.
  bar(plane) {
    const i = plane.axes.findIndex(({ across }) => across === 0);
    const [left, top, width, height] = plane.box, right = left + width - 14, y = top + height - 14;
    const pixels = plane.pixels[i] / this.viewer.spacing[plane.axes[i].axis], most = Math.min(BAR, 0.3 * width) / pixels;
    if (!(most > 0) || !Number.isFinite(most)) return [];
    const power = 10 ** Math.floor(Math.log10(most)), length = power * [5, 2, 1].find((f) => f * power <= most);
    const x = right - length * pixels, text = inWords(length);
    return [
      element("path", { d: `M${x} ${y - 4}V${y}H${right}V${y - 4}`, class: "bar", "data-pixels": (length * pixels).toFixed(2), "data-mm": length }),
      element("text", { x: (x + right) / 2, y: y - 7, class: "note middle" }, text),
    ];
  }

  // Digits after the point of a position in mm: one, or more for voxels under the microscope.
  get digits() { return Math.max(1, -Math.floor(Math.log10(Math.min(1, ...this.viewer.spacing)) + 1e-9)); }

  // Readout of the voxel under the pointer: position in mm, index, value, class.
  read(at = this.pointer) {
    this.pointer = at;
    const { viewer } = this, plane = at && viewer.at(...at), index = plane ? plane.index(plane.point(...at)) : -1;
    this.readout.hidden = index < 0;
    if (index < 0) return;
    const voxel = viewer.grid.voxel(index), parts = [];
    if (!this.context.picture && viewer.oriented)
      parts.push(viewer.millimetres(voxel).map((v, i) => `${["LR", "PA", "IS"][i][v < 0 ? 0 : 1]} ${Math.abs(v).toFixed(this.digits)}`).join("  ") + " mm");
    parts.push(`${this.context.picture ? "pixel" : "voxel"} ${(viewer.grid.slices > 1 ? voxel : voxel.slice(0, 2)).map((v) => v + 1).join(", ")}`);
    const value = viewer.intensity.at(index);
    parts.push(Array.isArray(value) ? `RGB ${value.join(", ")}` : `value ${Number(value.toPrecision(5))}`);
    const drawn = viewer.layers.labels?.[index], predicted = viewer.layers.maps.prediction?.[index];
    if (drawn) parts.push(`drawn: ${this.context.classes[drawn - 1].name}`);
    else if (predicted !== undefined) parts.push(`predicted: ${this.context.classes[predicted].name}`);
    this.readout.textContent = parts.join("  ·  ");
  }
}
