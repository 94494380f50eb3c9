-- Query plans: where the matches of a query over tags are, before any member is looked at.
--
-- A query is a tree of {all = nodes}, {any = nodes} and {tag, values, inverted}, which the module
-- redrb.stream.task.queries builds. Its leaves are counted first, with one ZCOUNT a range. Then a plan
-- names sorted sets, and ranges of them, that contain every match: for `all` those of the child with
-- fewest members, for `any` those of every child. The number of their members is the plan's cost; if
-- that is not below the size of the pool, the plan is the whole pool.
--@include task tags

-- Resolve the values of a leaf to scores: single scores are `points`, others `ranges`.
local function resolve_leaf(leaf)
  leaf.listed, leaf.points, leaf.ranges = not leaf.inverted, {}, {}
  for _, value in ipairs(leaf.values) do
    if type(value) == 'string' then
      local score = string_score(value)
      value = {score, score}
    end
    if value[1] == value[2] then
      leaf.points[value[1]] = true
    else
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

-- Count the members of a leaf's sorted set: `count` have a listed value, `known` any value; `missing`
-- groups of the pool have none. Ranges without members are dropped.
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

-- The plan for members for which `node` is `wanted`: its cost, and its sources as pairs {leaf, listed}:
-- the members of the leaf's sorted set that have a listed value, or those that have another.
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

-- First and last ranks, in a leaf's sorted set, of the members with a listed value or with another.
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
