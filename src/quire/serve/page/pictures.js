// Pictures of a message: dropped, pasted or chosen, scaled down, and kept with their turn as data URLs.

const LONGEST_SIDE = 1024; // pixels; larger pictures are scaled down, so that the browser has room to keep them
const MAX_PICTURES = 16; // of a message
const IS_PICTURE = /^data:image\/(png|jpeg|webp|gif);base64,/;

const pictures = {
  waiting: [], // of the next message

  async add(files) {
    const images = [...files].filter((file) => file.type.startsWith("image/"));
    if (!images.length) return;
    if (!server.sees) return announce("This model does not read pictures");
    for (const file of images) {
      if (this.waiting.length >= MAX_PICTURES) return announce(`A message has at most ${MAX_PICTURES} pictures`);
      try {
        this.waiting.push(await scaledDown(file));
      } catch {
        announce(`${file.name || "The picture"} cannot be read`);
      }
      this.show();
    }
  },
  take() {
    const taken = this.waiting;
    this.waiting = [];
    this.show();
    return taken;
  },
  show() {
    ui.pictures.hidden = !this.waiting.length;
    ui.pictures.replaceChildren(...this.waiting.map((url, i) => el("figure", {}, pictureView(url, i), iconButton("close", `Remove picture ${i + 1}`, () => {
      this.waiting.splice(i, 1);
      this.show();
    }))));
    showComposer();
  },
};

const pictureView = (src, i) => el("img", { src, alt: `Picture ${i + 1}` });

/** The pictures of a turn; nothing for a turn without. */
function picturesView(turn) {
  return turn.pictures?.length ? el("div", { className: "pictures" }, ...turn.pictures.map(pictureView)) : null;
}

async function scaledDown(file) {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, LONGEST_SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = el("canvas", { width: Math.max(1, Math.round(bitmap.width * scale)), height: Math.max(1, Math.round(bitmap.height * scale)) });
  const context = canvas.getContext("2d");
  context.fillStyle = "white"; // where the picture is transparent
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  const small = canvas.width * canvas.height <= 256 * 256; // drawings and letters stay sharp
  return canvas.toDataURL(small ? "image/png" : "image/jpeg", 0.9);
}

/** The content of a user's message as the API takes it. */
function contentOf(turn) {
  if (!turn.pictures?.length) return turn.text;
  const parts = turn.pictures.map((url) => ({ type: "image_url", image_url: { url } }));
  return turn.text ? [...parts, { type: "text", text: turn.text }] : parts;
}

/** Read the content of a message in an imported file: only its text and its pictures. */
function readContent(content) {
  const parts = Array.isArray(content) ? content : [{ type: "text", text: content }];
  const text = parts.filter((part) => part?.type === "text").map((part) => textOf(part.text)).join("\n");
  return { text, ...readPictures(parts.map((part) => part?.image_url?.url)) };
}

function readPictures(given) {
  const found = (Array.isArray(given) ? given : []).filter((url) => typeof url === "string" && IS_PICTURE.test(url)).slice(0, MAX_PICTURES);
  return found.length ? { pictures: found } : {};
}
