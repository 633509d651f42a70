-- What pandoc's writers do not do by themselves: a table that may be wider than the page, and boxes in Typst.
-- What they do and shall not: foreign text may hold links and pictures from elsewhere, and attributes that are programs.
local boxes = { missing = true, source = true, note = true }

function harmless(element)
  for name in pairs(element.attributes) do
    if name:lower():match("^on") or name:lower() == "style" then
      element.attributes[name] = nil
    end
  end
  return element
end

Span, Code, CodeBlock, Header = harmless, harmless, harmless, harmless

function Link(element)
  if element.target:match("^#") or element.target:match("^https://") then
    return harmless(element)
  end
  return element.content
end

function Image(element)
  if element.src:match("^figures/[%w.-]+%.svg$") then
    return harmless(element)
  end
  return element.caption
end

function Table(element)
  if FORMAT:match("html") then
    return pandoc.Div({ element }, { class = "wide", tabindex = "0" })
  end
end

function Div(element)
  harmless(element)
  if FORMAT == "typst" then
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
end
