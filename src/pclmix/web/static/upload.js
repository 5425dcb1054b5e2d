// Adding images: chosen in a dialog, or dropped on the page as files, folders or a zip.

import { upload } from "./api.js";
import { ask, make, toast } from "./dialogs.js";
import { zip } from "./zip.js";

const WANTED = /\.(nii|nii\.gz|zip|tiff?|png|bmp)$/i;
const WITH_STROKES = /(^|\/)(labelsTr|scribbles)\//;
const NEEDS_DICOM = "These are DICOM files. To read them: pip install '.[dicom]' in a clone of pclmix, then start the workbench again.";
const LARGEST_ZIP = 2 ** 32 - 2 ** 24; // zip.js writes sizes in four bytes; less, for the names of its files
const $ = (id) => document.getElementById(id);

// `takes` are the server's limits, `status` shows a line of text, `done` gets the first case that was added.
export function receive(takes, status, done) {
  let before = Promise.resolve(); // one drop after the other
  const add = (items) => { before = before.then(() => addAll(items)).catch((error) => toast(error.message ?? String(error), true)); };
  const addAll = async (items) => {
    status("Looking at the files…");
    const found = { cases: [], notes: [] };
    try {
      for (const { name, content } of await uploads(items, takes, found, status))
        try {
          const { cases, notes } = await upload(name, content, (share) => status(share < 1 ? `Adding ${name}: ${Math.round(share * 100)} %` : `Reading ${name}…`));
          found.cases.push(...cases);
          found.notes.push(...notes);
        } catch (error) { found.notes.push(error.message.startsWith(name.split(".")[0]) ? error.message : `${name}: ${error.message}`); }
    } finally { status(""); }
    tell(found);
    if (found.cases.length) await done(found.cases[0]);
  };
  $("add").onclick = async () => {
    const what = make("p", { className: "faint" }, "NIfTI, DICOM, PNG, TIFF or BMP, or a zip of them. They can also be dropped anywhere on this page.");
    const choice = await ask("Add images", [what], [["close", "Close"], ["folder", "Choose a folder"], ["file", "Choose files", true]]);
    if (choice !== "close") $(choice).click();
  };
  for (const input of [$("file"), $("folder")])
    input.onchange = () => {
      const items = [...input.files].map((file) => ({ path: file.webkitRelativePath || file.name, file }));
      input.value = "";
      if (items.length) add(items);
    };
  const drop = $("drop"), isFile = (event) => event.dataTransfer?.types.includes("Files");
  window.addEventListener("dragover", (event) => { if (isFile(event)) { event.preventDefault(); drop.hidden = false; } });
  window.addEventListener("dragleave", (event) => { if (!event.relatedTarget) drop.hidden = true; });
  window.addEventListener("drop", async (event) => {
    if (!isFile(event)) return;
    event.preventDefault();
    drop.hidden = true;
    const entries = [...event.dataTransfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
    const files = [...event.dataTransfer.files]; // both are gone after the first await
    try {
      add(entries.length ? (await Promise.all(entries.map(itemsOf))).flat() : files.map((file) => ({ path: file.name, file })));
    } catch (error) { toast(`The dropped folder cannot be read: ${error.message}`, true); }
  });
}

// What to send: images one by one; all DICOM files, and a folder that has strokes beside its images, as one zip.
async function uploads(items, takes, found, status) {
  const wanted = items.filter(({ path }) => WANTED.test(path));
  const scans = await scansAmong(items.filter(({ path }) => !WANTED.test(path)));
  const bundle = wanted.some(({ path }) => WITH_STROKES.test(path)) ? wanted.filter(({ path }) => !/\.zip$/i.test(path)) : [];
  if (!wanted.length && !scans.length) found.notes.push("None of these files is an image the workbench reads (NIfTI, DICOM, TIFF, PNG, BMP or a zip).");
  if (scans.length && takes.dicom) bundle.push(...scans);
  else if (scans.length) found.notes.push(NEEDS_DICOM);
  const single = wanted.filter((item) => !bundle.includes(item)), sending = [];
  for (const { file } of single)
    if (file.size > takes.upload) found.notes.push(`${file.name} is larger than ${mib(takes.upload)}, the most the workbench takes (--max-upload).`);
    else sending.push({ name: file.name, content: file });
  if (!bundle.length) return sending;
  const size = bundle.reduce((sum, { file }) => sum + file.size, 0), name = `${bundle[0].path.split("/")[0] || "files"}.zip`;
  if (bundle.length > takes.files) found.notes.push(`These are ${bundle.length} files; the workbench takes ${takes.files} at once. Drop fewer folders.`);
  else if (size > takes.upload) found.notes.push(`These files are ${mib(size)}; the workbench takes ${mib(takes.upload)} at once (--max-upload). Drop fewer folders.`);
  else if (size > LARGEST_ZIP) found.notes.push(`These files are ${mib(size)}; a browser can send ${mib(LARGEST_ZIP)} at once. Drop fewer folders.`);
  else sending.push({ name, content: await zip(bundle, (share) => status(`Reading ${bundle.length} files: ${Math.round(share * 100)} %`)) });
  return sending;
}

const mib = (bytes) => `${Math.ceil(bytes / 2 ** 20)} MiB`;

// DICOM files have any name: what they are stands at byte 128.
async function scansAmong(items) {
  const found = [];
  for (const item of items) {
    if (item.file.name.startsWith(".")) continue;
    if (await item.file.slice(128, 132).text() === "DICM") found.push(item);
  }
  return found;
}

function tell({ cases, notes }) {
  const added = cases.length > 5 ? `Added ${cases.length} cases` : `Added ${cases.join(", ")}`;
  if (notes.length < 3) {
    if (cases.length) toast(added);
    for (const note of notes) toast(note, true);
    return;
  }
  const list = make("ul", { className: "notes" }, ...notes.map((note) => make("li", {}, note)));
  ask(cases.length ? "Some could not be added" : "Nothing could be added", [make("p", {}, cases.length ? `${added}. Not added:` : "Not added:"), list], [["close", "Close", true]]);
}

// Every file of an entry, which may be a folder of folders, with its path.
async function itemsOf(entry) {
  if (entry.isFile) {
    const file = await new Promise((resolve, reject) => entry.file(resolve, reject));
    return [{ path: entry.fullPath.replace(/^\//, ""), file }];
  }
  const reader = entry.createReader(), found = [];
  for (;;) { // a reader hands out a folder in parts
    const part = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (!part.length) break;
    found.push(...part);
  }
  const items = [];
  for (const inner of found) items.push(...await itemsOf(inner)); // one by one: thousands at once exhaust the browser
  return items;
}
