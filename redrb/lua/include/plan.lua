-- How a query over tags finds what matches, before any member is looked at.
--
-- A query is a tree of {all = nodes}, {any = nodes} and {tag, values, inverted}: see where.py. Its
-- leaves are counted first, with a ZCOUNT a range. Then a plan says which members of which sorted
-- sets hold every match: of `all` the members of the child that has fewest, of `any` those of every
-- child. Its cost is their number; where that is not below the pool's size, the plan is the pool.
--@include task tags

-- Count the members of a leaf's sorted set: `count` have a listed value, `known` any, `missing` are
-- in the pool and not in it.
local function count_leaf(leaf, pool, size)
  leaf.zset, leaf.listed = key('tag', pool .. ':' .. leaf.tag), not leaf.inverted
  leaf.known, leaf.count = redis.call('ZCARD', leaf.zset), 0
  leaf.missing = size - leaf.known
  leaf.parts, leaf.points, leaf.ranges = {}, {}, {}
  for _, value in ipairs(leaf.values) do
    if type(value) == 'string' then
      local score = term(leaf.tag, value, false)
      value = score and {tonumber(score), tonumber(score)} or {1, 0}
    end
    local low, high = string.format('%.17g', value[1]), string.format('%.17g', value[2])
    local count = redis.call('ZCOUNT', leaf.zset, low, high)
    if count > 0 then
      leaf.count = leaf.count + count
      leaf.parts[#leaf.parts + 1] = {low = low, count = count}
      if low == high then
        leaf.points[value[1]] = true
      else
        leaf.ranges[#leaf.ranges + 1] = value
      end
    end
  end
end

-- Prepare a query for a pool: its root, its leaves, and the pool itself as a leaf without values.
local function prepare(pool, names, root)
  local ready, declared, leaves = key('ready', pool), {}, {}
  local size = redis.call('ZCARD', ready)
  for _, name in ipairs(names) do
    declared[name] = true
  end
  local function visit(node)
    if node.tag then
      if not declared[node.tag] then
        error('the task no longer declares the tag ' .. node.tag .. ': open the stream again')
      end
      count_leaf(node, pool, size)
      leaves[#leaves + 1] = node
    else
      node.every, node.children = node.all ~= nil, node.all or node.any
      for _, child in ipairs(node.children) do
        visit(child)
      end
    end
  end
  visit(root)
  return {root = root, leaves = leaves, size = size,
    whole = {zset = ready, known = size, parts = {}, listed = false}}
end

-- Where everything is for which `node` is `wanted`: how many members, and of which leaves, as pairs
-- {leaf, whether those with a listed value}.
local function plan(query, node, wanted)
  local walk = {{query.whole, false}}
  if node.zset then
    if node.listed == wanted then
      return node.count, {{node, true}}
    elseif node.missing == 0 then
      return node.known - node.count, {{node, false}}
    end
    return query.size, walk
  end
  local least, fewest, total, every = query.size, walk, 0, {}
  for _, child in ipairs(node.children) do
    local cost, sources = plan(query, child, wanted)
    if cost < least then
      least, fewest = cost, sources
    end
    total = total + cost
    for _, source in ipairs(sources) do
      every[#every + 1] = source
    end
  end
  if node.every == wanted then
    return least, fewest
  elseif total < query.size then
    return total, every
  end
  return query.size, walk
end

-- First and last ranks, in a leaf's sorted set, of the members with a listed value, or of the others.
local function ranks(leaf, listed)
  local found, others, after = {}, {}, 0
  for i, part in ipairs(leaf.parts) do
    local first = redis.call('ZCOUNT', leaf.zset, '-inf', '(' .. part.low)
    found[i] = {first, first + part.count - 1}
  end
  if listed then
    return found
  end
  table.sort(found, function(one, other) return one[1] < other[1] end)
  for _, span in ipairs(found) do
    others[#others + 1] = {after, span[1] - 1}
    after = span[2] + 1
  end
  others[#others + 1] = {after, leaf.known - 1}
  return others
end
