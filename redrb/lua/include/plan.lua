-- How a query over tags finds what matches, before any member is looked at.
--
-- A query is a tree of {all = nodes}, {any = nodes} and {tag, values, inverted}: see where.py. Its
-- leaves are counted first, with a ZCOUNT a range. Then a plan says which members of which sorted
-- sets hold every match: of `all` the members of the child that has fewest, of `any` those of every
-- child. Its cost is their number; where that is not below the pool's size, the plan is the pool.
--@include task tags

-- Resolve the values of a leaf to scores: single scores are `points`, others `ranges`.
local function resolve_leaf(leaf)
  leaf.listed, leaf.points, leaf.ranges = not leaf.inverted, {}, {}
  for _, value in ipairs(leaf.values) do
    if type(value) == 'string' then
      local score = term(leaf.tag, value, false)
      value = score and {score, score}
    end
    if value and value[1] == value[2] then
      leaf.points[value[1]] = true
    elseif value then
      leaf.ranges[#leaf.ranges + 1] = value
    end
  end
end

-- Check and resolve a query. Returns it as {root, leaves}.
local function resolve(names, root)
  local declared, leaves = {}, {}
  for _, name in ipairs(names) do
    declared[name] = true
  end
  local function visit(node)
    if node.tag then
      if not declared[node.tag] then
        error('the task no longer declares the tag ' .. node.tag .. ': open the stream again')
      end
      resolve_leaf(node)
      leaves[#leaves + 1] = node
    else
      node.every, node.children = node.all ~= nil, node.all or node.any
      for _, child in ipairs(node.children) do
        visit(child)
      end
    end
  end
  visit(root)
  return {root = root, leaves = leaves}
end

-- Count the members of a leaf's sorted set: `count` have a listed value, `known` any, `missing` are
-- in the pool and not in it. Ranges that no member has are dropped.
local function count_leaf(leaf, pool, size)
  leaf.zset = key('tag', pool .. ':' .. leaf.tag)
  leaf.known, leaf.count, leaf.parts = redis.call('ZCARD', leaf.zset), 0, {}
  leaf.missing = size - leaf.known
  local function count(low, high)
    local found = redis.call('ZCOUNT', leaf.zset, low, high)
    if found > 0 then
      leaf.count = leaf.count + found
      leaf.parts[#leaf.parts + 1] = {low = low, count = found}
    end
    return found
  end
  for point in pairs(leaf.points) do
    local score = string.format('%.17g', point)
    count(score, score)
  end
  local ranges = leaf.ranges
  leaf.ranges = {}
  for _, range in ipairs(ranges) do
    if count(string.format('%.17g', range[1]), string.format('%.17g', range[2])) > 0 then
      leaf.ranges[#leaf.ranges + 1] = range
    end
  end
end

-- Prepare a query for a pool: count its leaves; the pool itself is a leaf without values.
local function prepare(pool, names, root)
  local query, ready = resolve(names, root), key('ready', pool)
  query.size = redis.call('ZCARD', ready)
  for _, leaf in ipairs(query.leaves) do
    count_leaf(leaf, pool, query.size)
  end
  query.whole = {zset = ready, known = query.size, parts = {}, listed = false}
  return query
end

-- Where everything is for which `node` is `wanted`: how many members, and of which leaves, as pairs
-- {leaf, whether those with a listed value}.
local function plan(query, node, wanted)
  local walk = {{query.whole, false}}
  if node.tag then
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
local function rank_spans(leaf, listed)
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
