-- Queries over the tags of groups, by their facts.
--
-- A query is a tree of {all = nodes}, {any = nodes} and {tag, values, inverted}, which the module
-- redrb.stream.task.queries builds. A value is a string, or a range of numbers {low, high} with both ends.
--@include facts

local UNTAGGED = {}

-- Sort the values of a condition: strings and single numbers are `listed`, other numbers lie in `ranges`.
local function sort_values(condition)
  condition.listed, condition.ranges = {}, {}
  for _, value in ipairs(condition.values) do
    if type(value) == 'string' then
      condition.listed[value] = true
    elseif value[1] == value[2] then
      condition.listed[value[1]] = true
    else
      table.insert(condition.ranges, value)
    end
  end
end

-- Read a query, and check that the task declares its tags.
local function read_query(where)
  local declared = {}
  for _, name in ipairs(rules().names) do
    declared[name] = true
  end
  local function visit(node)
    if node.tag and not declared[node.tag] then
      error('the task no longer declares the tag ' .. node.tag .. ': open the stream again')
    elseif node.tag then
      sort_values(node)
    end
    node.every, node.children = node.all ~= nil, node.all or node.any
    for _, child in ipairs(node.children or {}) do
      visit(child)
    end
    return node
  end
  return visit(cjson.decode(where))
end

-- Whether a condition lists the value of a tag, nil for none.
local function lists(condition, value)
  if value == nil or condition.listed[value] then
    return value ~= nil
  end
  for _, range in ipairs(type(value) == 'number' and condition.ranges or {}) do
    if value >= range[1] and value <= range[2] then
      return true
    end
  end
  return false
end

local function tags_satisfy(node, tags)
  if node.tag then
    return lists(node, tags[node.tag]) ~= node.inverted
  end
  for _, child in ipairs(node.children) do
    if tags_satisfy(child, tags) ~= node.every then
      return not node.every
    end
  end
  return node.every
end

-- Whether a group with these facts, false for none, satisfies a query.
local function satisfies(query, facts)
  return tags_satisfy(query, facts and facts.tags or UNTAGGED)
end
