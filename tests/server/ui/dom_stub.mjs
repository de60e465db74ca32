// As much of a document as the page's scripts need to make elements, for tests without a browser.

class Element {
  constructor(tag) {
    Object.assign(this, { tag, attributes: {}, children: [], parent: null, dataset: {}, on: {} });
    this.style = { setProperty: (name, value) => { this.attributes[name] = value; } };
    this.classList = { add: (name) => this.setAttribute("class", `${this.attributes.class ?? ""} ${name}`.trim()) };
    if (tag !== null) document.made += 1;
  }

  setAttribute(name, value) { this.attributes[name] = String(value); }

  removeAttribute(name) { delete this.attributes[name]; }

  toggleAttribute(name, is) { (is ? this.setAttribute(name, "") : this.removeAttribute(name)); }

  addEventListener(kind, what) { this.on[kind] = what; }

  append(...nodes) {
    for (const node of nodes) {
      const parts = node instanceof Element && node.tag === null ? node.children.splice(0) : [node];
      for (const part of parts) {
        if (part instanceof Element) part.parent = this;
        this.children.push(part);
      }
    }
  }

  replaceChildren(...nodes) {
    this.children = [];
    this.append(...nodes);
  }

  remove() { this.parent.children = this.parent.children.filter((one) => one !== this); }

  get childNodes() { return this.children; }

  get textContent() { return this.children.map((one) => one.textContent ?? one).join(""); }

  set textContent(text) { this.replaceChildren(text); }

  /** [tag, attributes, children], texts that follow each other joined. */
  toJSON() {
    const children = [];
    for (const one of this.children) {
      if (one instanceof Element) children.push(one.toJSON());
      else if (typeof children.at(-1) === "string") children[children.length - 1] += one;
      else children.push(String(one));
    }
    return [this.tag, this.attributes, children];
  }
}

globalThis.document = {
  made: 0, // elements
  createElement: (tag) => new Element(tag),
  createElementNS: (_, tag) => new Element(tag),
  createDocumentFragment: () => new Element(null),
};
document.head = new Element("head");
