-- Queries over the tags of the groups that wait in a pool; they only read.
--
-- count_where: a query of one condition costs its ZCOUNTs. Any other looks at the members of the
-- cheaper plan, the query's or its negation's.
-- select_where: walks the pool in its order until n groups match. Once it has looked at as many members
-- as the plan has, it looks at the plan's members instead and sorts them: at most twice the cheaper way.
--@include plan


-- Whether the i-th of the members that are looked at has a listed value: scores[i] is its score.
-- `certain` says so for all of them.
local function is_listed(leaf, i)
  if leaf.certain ~= nil then
    return leaf.certain
  end
  local score = leaf.scores[i]
  if not score then
    return false
  end
  score = tonumber(score)
  if leaf.points[score] then
    return true
  end
  for _, range in ipairs(leaf.ranges) do
    if score >= range[1] and score <= range[2] then
      return true
    end
  end
  return false
end

-- Whether the i-th of the members that are looked at satisfies a query, or a part of one.
local function satisfies(node, i)
  if node.tag then
    return is_listed(node, i) == node.listed
  end
  for _, child in ipairs(node.children) do
    if satisfies(child, i) ~= node.every then
      return not node.every
    end
  end
  return node.every
end

-- The members, of at most PAGE.matched, for which the query is `wanted`, without members of the first `known`
-- sources, if these are given.
local function matching(query, members, wanted, sources, known)
  local scores, found = {}, {}
  for _, leaf in ipairs(#members > 0 and query.leaves or {}) do
    if leaf.certain == nil then
      scores[leaf.zset] = scores[leaf.zset] or redis.call('ZMSCORE', leaf.zset, unpack(members))
      leaf.scores = scores[leaf.zset]
    end
  end
  for i, member in ipairs(members) do
    local fresh = satisfies(query.root, i) == wanted
    for j = 1, fresh and known or 0 do -- bound: conditions of the query, 256 at most (MOST_CONDITIONS)
      fresh = fresh and is_listed(sources[j][1], i) ~= sources[j][2]
    end
    if fresh then
      found[#found + 1] = member
    end
  end
  return found
end

-- Call `visit` with the matches among the members of a plan, part by part, each member once.
local function search(query, wanted, sources, visit)
  for known, source in ipairs(sources) do
    local leaf, listed = source[1], source[2]
    leaf.certain = listed
    for _, span in ipairs(rank_spans(leaf, listed)) do
      for first = span[1], span[2], PAGE.matched do -- bound: the span's groups (decisions/queries.md)
        local last = math.min(first + PAGE.matched - 1, span[2])
        local members = redis.call('ZRANGE', leaf.zset, first, last)
        visit(matching(query, members, wanted, sources, known - 1))
      end
    end
    leaf.certain = nil
  end
end

local function count_where(pool, names, expr)
  local query = prepare(pool, names, expr)
  local root, found = query.root, 0
  if root.tag then
    return root.listed and root.count or query.size - root.count
  end
  local cost, sources = plan(query, root, true)
  local other_cost, others = plan(query, root, false)
  local wanted = cost <= other_cost
  search(query, wanted, wanted and sources or others, function(members)
    found = found + #members
  end)
  return wanted and found or query.size - found
end

-- Sort {score, member} as the pool does, and keep the first n.
local function keep_first(found, n)
  table.sort(found, function(one, other)
    return one[1] < other[1] or (one[1] == other[1] and one[2] < other[2])
  end)
  for i = #found, n + 1, -1 do -- bound: found
    found[i] = nil
  end
end

-- The first n >= 1 members that match, in the pool's order.
local function select_where(pool, names, expr, n)
  local query = prepare(pool, names, expr)
  local ready = query.whole.zset
  local cost, sources = plan(query, query.root, true)
  local chosen, looked, step = {}, 0, math.min(n, PAGE.matched)
  while looked < cost do -- bound: `cost` groups (docs/contributing/decisions/queries.md)
    local last = math.min(looked + step, cost) - 1
    for _, member in ipairs(matching(query, redis.call('ZRANGE', ready, looked, last), true)) do
      chosen[#chosen + 1] = member
      if #chosen == n then
        return chosen
      end
    end
    looked, step = last + 1, math.min(step * 2, PAGE.matched)
  end
  if looked >= query.size then
    return chosen
  end
  local found = {}
  search(query, true, sources, function(members)
    local scores = #members > 0 and redis.call('ZMSCORE', ready, unpack(members)) or {}
    for i, score in ipairs(scores) do
      found[#found + 1] = {tonumber(score), members[i]}
    end
    if #found > n + 4 * PAGE.matched then
      keep_first(found, n)
    end
  end)
  keep_first(found, n)
  for i, each in ipairs(found) do
    chosen[i] = each[2]
  end
  return chosen
end
