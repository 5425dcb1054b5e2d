// Adding images: chosen in a dialog, or dropped on the page as files, folders or a zip.

import { upload } from "./api.js";
import { toast } from "./dialogs.js";

const WANTED = /\.(nii|nii\.gz|zip|tiff?|png|bmp)$/i;
const $ = (id) => document.getElementById(id);

// `status` shows a line of text; `done` is called when all files have been sent.
export function receive(status, done) {
  const add = async (files) => {
    const wanted = files.filter((file) => WANTED.test(file.name));
    if (files.length && !wanted.length) toast("None of these files is an image the workbench reads (NIfTI, TIFF, PNG, BMP or a zip).", true);
    for (const file of wanted)
      try {
        const { cases, notes } = await upload(file, (share) => status(`Adding ${file.name}: ${Math.round(share * 100)} %`));
        toast(`Added ${cases.join(", ")}`);
        for (const note of notes) toast(note, true);
      } catch (error) { toast(`${file.name}: ${error.message}`, true); }
    status("");
    await done();
  };
  $("add").onclick = () => $("file").click();
  $("file").onchange = () => { const files = [...$("file").files]; $("file").value = ""; add(files); };
  const drop = $("drop"), isFile = (event) => event.dataTransfer?.types.includes("Files");
  window.addEventListener("dragover", (event) => { if (isFile(event)) { event.preventDefault(); drop.hidden = false; } });
  window.addEventListener("dragleave", (event) => { if (!event.relatedTarget) drop.hidden = true; });
  window.addEventListener("drop", async (event) => {
    if (!isFile(event)) return;
    event.preventDefault();
    drop.hidden = true;
    const entries = [...event.dataTransfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
    const files = entries.length ? (await Promise.all(entries.map(filesOf))).flat() : [...event.dataTransfer.files];
    await add(files);
  });
}

// Every file of an entry, which may be a folder of folders.
async function filesOf(entry) {
  if (entry.isFile) return [await new Promise((resolve, reject) => entry.file(resolve, reject))];
  const reader = entry.createReader(), found = [];
  for (;;) { // a reader hands out a folder in parts
    const part = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (!part.length) break;
    found.push(...part);
  }
  return (await Promise.all(found.map(filesOf))).flat();
}
