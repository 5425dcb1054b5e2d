// Adding images, chosen in a dialog or dropped on the page as files, folders or a zip.

import { upload } from "./api.js";
import { ask, make, toast } from "./dialogs.js";
import { zip } from "./zip.js";

const WANTED = /\.(nii|nii\.gz|zip|tiff?|png|bmp|jpe?g)$/i;
const WITH_STROKES = /(^|\/)(labelsTr|scribbles)\//;
const NEEDS_DICOM = "These are DICOM files. To read them: pip install '.[dicom]' in a clone of pclmix, or pip install pydicom highdicom; then start the workbench again.";
const LARGEST_ZIP = 2 ** 32 - 2 ** 24; // zip.js writes 32-bit sizes; minus a margin for the directory
const $ = (id) => document.getElementById(id);

// `takes` are the limits of the server, `status` shows a line of text, `done` is called with the first new case.
export function receive(takes, status, done) {
  let before = Promise.resolve(); // process drops one after the other
  const add = (items) => { before = before.then(() => addAll(items)).catch((error) => toast(error.message ?? String(error), true)); };
  const addAll = async (items) => {
    status("Reading files…");
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
    const what = make("p", { className: "faint" }, "NIfTI, DICOM, PNG, TIFF, JPEG or BMP, or a zip of them. They can also be dropped anywhere on this page.");
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
    const files = [...event.dataTransfer.files]; // read now: both are empty after the first await
    try {
      add(entries.length ? (await Promise.all(entries.map(itemsOf))).flat() : files.map((file) => ({ path: file.name, file })));
    } catch (error) { toast(`The dropped folder cannot be read: ${error.message}`, true); }
  });
}

// Images are sent one by one; DICOM files and folders with strokes are sent as one zip.
async function uploads(items, takes, found, status) {
  const wanted = items.filter(({ path }) => WANTED.test(path));
  const scans = await scansAmong(items.filter(({ path }) => !WANTED.test(path)));
  const bundle = wanted.some(({ path }) => WITH_STROKES.test(path)) ? wanted.filter(({ path }) => !/\.zip$/i.test(path)) : [];
  if (!wanted.length && !scans.length) found.notes.push("None of these files is a supported image (NIfTI, DICOM, PNG, TIFF, JPEG, BMP or a zip).");
  if (scans.length && takes.dicom) bundle.push(...scans);
  else if (scans.length) found.notes.push(NEEDS_DICOM);
  const single = wanted.filter((item) => !bundle.includes(item)), sending = [];
  for (const { file } of single)
    if (file.size > takes.upload) found.notes.push(`${file.name} is larger than the limit of ${mib(takes.upload)} (--max-upload).`);
    else sending.push({ name: file.name, content: file });
  if (!bundle.length) return sending;
  const size = bundle.reduce((sum, { file }) => sum + file.size, 0), name = `${bundle[0].path.split("/")[0] || "files"}.zip`;
  if (bundle.length > takes.files) found.notes.push(`These are ${bundle.length} files; the limit is ${takes.files} at once. Drop fewer folders.`);
  else if (size > takes.upload) found.notes.push(`These files are ${mib(size)}; the limit is ${mib(takes.upload)} (--max-upload). Drop fewer folders.`);
  else if (size > LARGEST_ZIP) found.notes.push(`These files are ${mib(size)}; the limit of a single zip is ${mib(LARGEST_ZIP)}. Drop fewer folders.`);
  else sending.push({ name, content: await zip(bundle, (share) => status(`Reading ${bundle.length} files: ${Math.round(share * 100)} %`)) });
  return sending;
}

const mib = (bytes) => `${Math.ceil(bytes / 2 ** 20)} MiB`;

// DICOM files are recognised by the magic at byte 128, not by name.
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

// All files of an entry, recursively, with their paths.
async function itemsOf(entry) {
  if (entry.isFile) {
    const file = await new Promise((resolve, reject) => entry.file(resolve, reject));
    return [{ path: entry.fullPath.replace(/^\//, ""), file }];
  }
  const reader = entry.createReader(), found = [];
  for (;;) { // readEntries returns a folder in batches
    const part = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (!part.length) break;
    found.push(...part);
  }
  const items = [];
  for (const inner of found) items.push(...await itemsOf(inner)); // sequentially: thousands of parallel reads exhaust the browser
  return items;
}
