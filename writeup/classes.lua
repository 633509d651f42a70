-- What pandoc's writers do not do by themselves: a table that may be wider than the page, and boxes in Typst.
local boxes = { missing = true, source = true, note = true }

function Table(element)
  if FORMAT:match("html") then
    return pandoc.Div({ element }, { class = "wide", tabindex = "0" })
  end
end

function Div(element)
  if FORMAT == "typst" then
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
