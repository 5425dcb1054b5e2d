// The first slice, painted on a 2-D canvas while the viewer is still starting, at exactly the place where the viewer
// will show it.

import { Grid } from "./grid.js";
import { gunzip, parse } from "./nifti.js";
import { layout } from "./planes.js";

const MOST = 1500; // ms to wait for the first slice before loading the rest of the page

// Settings in localStorage, which may be disabled.
export const kept = (key) => { try { return localStorage.getItem(`pclmix.${key}`); } catch { return null; } };
export const keep = (key, value) => { try { localStorage.setItem(`pclmix.${key}`, value); } catch { /* forbidden */ } };
export const remember = (name) => keep("case", name); // the last open case

// Case and slice (from 1) requested in the URL.
const address = new URLSearchParams(location.search);
export const asked = { case: address.get("case"), slice: Number(address.get("slice")) > 0 ? Number(address.get("slice")) - 1 : undefined };

const frame = () => new Promise((resolve) => { requestAnimationFrame(resolve); });
let canvas = null, slice = null, watching = null, over = false;

// {name, image} of the case to open, the image decompressed; null if there is none or the request fails.
export const first = fetchFirst().catch(() => null);

// Resolves once the slice is painted or cannot be; with a timeout, since background pages get no frames.
const painted = Promise.race([show().catch(() => {}), new Promise((resolve) => { setTimeout(resolve, MOST); })]);
painted.then(() => import("./app.js")); // starting the application blocks the page

export function takeOver() {
  over = true;
  watching?.disconnect();
  canvas?.remove();
  slice = canvas = null;
}

async function fetchFirst() {
  const wanted = asked.case ?? kept("case") ?? "";
  const response = await fetch(`/api/first?case=${encodeURIComponent(wanted)}`);
  if (response.status !== 200) return null;
  const image = await response.arrayBuffer(), picture = response.headers.get("x-picture") === "1";
  return { name: decodeURIComponent(response.headers.get("x-case")), picture, image: await gunzip(image).catch(() => image) };
}

async function show() {
  const found = await first, volume = found && parse(found.image);
  const sheet = document.querySelector("link[rel=stylesheet]");
  if (!volume) return;
  if (!sheet.sheet) await new Promise((resolve) => { sheet.addEventListener("load", resolve); });
  while (!document.getElementById("slices")) await frame(); // the HTML is still being parsed
  if (over) return; // the viewer was ready first
  slice = render(volume, found);
  document.getElementById("view").classList.toggle("with-slices", slice.many);
  document.getElementById("slices").hidden = !slice.many;
  canvas = Object.assign(document.createElement("canvas"), { id: "first" });
  document.getElementById("canvas-box").append(canvas);
  watching = new ResizeObserver(paint);
  watching.observe(canvas);
  paint();
  await frame();
  await frame(); // now the previous frame is on the screen
  performance.mark("first slice"); // read by benchmarks/web.py
}

// One slice with one pixel per voxel, oriented as in the viewer, and its size in mm.
function render({ dims, pixDims, perm, oriented, coloured, voxels, scaled, window: [low, high] }, { name, picture }) {
  const grid = new Grid(dims, perm), [p, q] = grid.plane(), [width, height] = [grid.ras[p], grid.ras[q]];
  const wanted = name === asked.case && asked.slice !== undefined ? asked.slice : Math.floor(grid.slices / 2);
  const at = grid.rasVoxel(0, 0, Math.min(grid.slices - 1, wanted));
  const drawn = new ImageData(width, height), grey = 255 / (high - low || 1);
  const mirrored = !picture && oriented && p === 0; // the patient's left on the right
  const colours = coloured ? [0, 1, 2] : [0, 0, 0], each = coloured ? 3 : 1;
  let to = 0;
  for (let y = height - 1; y >= 0; y--) // anterior or superior up
    for (let x = 0; x < width; x++) {
      at[p] = mirrored ? width - 1 - x : x;
      at[q] = y;
      const from = each * grid.native(...at);
      for (const k of colours) drawn.data[to++] = (scaled(voxels[from + k]) - low) * grey;
      drawn.data[to++] = 255;
    }
  const held = document.createElement("canvas");
  Object.assign(held, { width, height });
  held.getContext("2d", { willReadFrequently: true }).putImageData(drawn, 0, 0);
  const three = kept("planes") === "3" && !picture && grid.slices > 3;
  return { held, size: [width * pixDims[grid.axis[p]], height * pixDims[grid.axis[q]]], many: grid.slices > 1, three, depth: grid.depth };
}

function paint() {
  if (!canvas || !slice) return;
  const dpr = devicePixelRatio || 1, { held, size } = slice;
  const [[, left, top, boxWidth, boxHeight]] = layout(slice.depth, slice.three, canvas.clientWidth, canvas.clientHeight);
  canvas.width = canvas.clientWidth * dpr;
  canvas.height = canvas.clientHeight * dpr;
  const scale = dpr * Math.min(boxWidth / size[0], boxHeight / size[1]), [w, h] = size.map((n) => n * scale);
  const [x, y] = [dpr * (left + boxWidth / 2) - w / 2, dpr * (top + boxHeight / 2) - h / 2];
  const edge = (at) => Math.ceil(at - 0.5); // rasterization rule of WebGL
  canvas.getContext("2d", { willReadFrequently: true }).drawImage(held, edge(x), edge(y), edge(x + w) - edge(x), edge(y + h) - edge(y));
}
