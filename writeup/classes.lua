-- What pandoc's writers do not do by themselves: numbers of figures and tables and links that name them, parts that are
-- folded away on the page and stand in an appendix on paper, wide tables, boxes in Typst.
-- What they do and shall not: foreign text may hold links and pictures from elsewhere, and attributes that are programs.
local boxes = { missing = true, source = true, note = true, answer = true }
local count, numbers, appendix, chapter = { Figure = 0, Table = 0 }, {}, pandoc.Blocks({}), nil

local function harmless(element)
  for name in pairs(element.attributes) do
    if name:lower():match("^on") or name:lower() == "style" then
      element.attributes[name] = nil
    end
  end
  return element
end

local function numbered(element)
  local caption, kind = element.caption.long, element.t
  if #caption == 0 then
    return nil
  end
  count[kind] = count[kind] + 1
  local label = kind .. " " .. count[kind]
  numbers[element.identifier ~= "" and element.identifier or label] = label
  local first = caption[1]
  first.content:insert(1, pandoc.Strong({ pandoc.Str(label .. ".") }))
  first.content:insert(2, pandoc.Space())
  return element
end

-- In the order in which they stand on paper, where what is folded away comes last.
local function number_all(document)
  for _, later in ipairs({ false, true }) do
    for place, block in ipairs(document.blocks) do
      if (block.t == "Div" and block.classes:includes("details")) == later then
        document.blocks[place] = pandoc.Blocks({ block }):walk({ Figure = numbered, Table = numbered })[1]
      end
    end
  end
  return document
end

local function link(element)
  if FORMAT == "typst" and element.target:match("^#test%-") then
    return element.content -- the listing is on the page only
  end
  if element.target:match("^#") or element.target:match("^https://") then
    local number = numbers[element.target:sub(2)]
    if #element.content == 0 and number then
      element.content = { pandoc.Str(number) }
    end
    return harmless(element)
  end
  return element.content
end

local function image(element)
  if element.src:match("^figures/[%w.-]+%.svg$") then
    return harmless(element)
  end
  return element.caption
end

local function table_(element)
  if FORMAT:match("html") then
    return pandoc.Div({ element }, { class = "wide", tabindex = "0" })
  end
end

local function header(element)
  if FORMAT:match("html") and element.level > 1 and element.identifier ~= "" then
    element.content:insert(pandoc.Link({}, "#" .. element.identifier, "", { class = "permalink",
      ["aria-label"] = "Link to this section" }))
  end
  return harmless(element)
end

local function div(element)
  harmless(element)
  local title = element.attributes.title
  element.attributes.title = nil
  if element.classes:includes("details") and FORMAT:match("html") then
    local blocks = pandoc.Blocks({ pandoc.RawBlock("html", "<details class=\"more\"><summary>"), pandoc.Plain(title),
      pandoc.RawBlock("html", "</summary>") })
    blocks:extend(element.content)
    blocks:insert(pandoc.RawBlock("html", "</details>"))
    return blocks
  end
  if FORMAT ~= "typst" then
    return element
  end
  -- Listings that a reader looks up by a link are for the page: on paper they would be a book of their own.
  if element.classes:includes("sources") then
    return {}
  end
  for _, class in ipairs(element.classes) do
    if boxes[class] then
      local blocks = pandoc.Blocks({ pandoc.RawBlock("typst", "#" .. class .. "[") })
      blocks:extend(element.content)
      blocks:insert(pandoc.RawBlock("typst", "]"))
      return blocks
    end
  end
end

-- On paper a chapter's question stays with its answer, words before a listing and the name of a table with these, and
-- commands are not justified.
local function wrapped(block, before, after)
  local name, follows = nil, after and after.t
  if block.t == "Para" then
    local first = block.content[1].t
    local named = (before == chapter and first == "Emph") or (first == "Strong" and follows == "Table")
    if named or follows == "CodeBlock" then
      name = "together"
    elseif first == "Strong" then
      local words = pandoc.utils.stringify(block.content[1])
      name = (words == "Reproduce:" or words == "Detected by") and "ragged" or nil
    end
  end
  if not name then
    return { block }
  end
  return { pandoc.RawBlock("typst", "#" .. name .. "["), block, pandoc.RawBlock("typst", "]") }
end

local function moved(document)
  if FORMAT ~= "typst" then
    return nil
  end
  local kept, before = pandoc.Blocks({}), nil
  for place, block in ipairs(document.blocks) do
    if block.t == "Header" and block.level == 2 then
      chapter = block
    end
    if block.t == "Div" and block.classes:includes("details") then
      if not block.classes:includes("sources") then
        local words = pandoc.utils.stringify(chapter) .. ": " .. block.attributes.title
        appendix:insert(pandoc.Header(3, pandoc.Inlines(words)))
        for at, each in ipairs(block.content) do
          appendix:extend(wrapped(each, block.content[at - 1], block.content[at + 1]))
        end
      end
    else
      kept:extend(wrapped(block, before, document.blocks[place + 1]))
    end
    before = block
  end
  if #appendix > 0 then
    kept:insert(pandoc.Header(2, pandoc.Inlines("Tables and statistics"), { id = "statistics" }))
    kept:extend(appendix)
  end
  document.blocks = kept
  return document
end

return {
  { Pandoc = number_all },
  { Link = link, Image = image, Span = harmless, Code = harmless, CodeBlock = harmless },
  { Pandoc = moved },
  { Table = table_, Header = header, Div = div },
}
