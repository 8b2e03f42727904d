document.querySelectorAll('figure.chart').forEach(f=>{
const p=f.querySelector('.plot'),lines=[...f.querySelectorAll('path.line')].map(e=>({n:e.dataset.n,p:(e.getAttribute('d').match(/-?\d+,-?\d+/g)||[]).map(q=>q.split(',').map(Number))})).filter(l=>l.p.length);
if(!lines.length||!f.dataset.xn)return;
const s=t=>{const[a,b,l]=t.split(' ').map(Number);return v=>l?Math.exp(Math.log(a)+v*(Math.log(b)-Math.log(a))):a+v*(b-a)},X=s(f.dataset.x),Y=s(f.dataset.y);
const num=v=>Math.abs(v)>=1e4?Math.round(v).toLocaleString('en'):String(+v.toPrecision(3));
const unit=f.dataset.u,show=v=>unit==='B'?(v>=2**30?(v/2**30).toFixed(2)+' GiB':(v/2**20).toFixed(1)+' MiB'):num(v);
const xs=v=>f.dataset.xn==='time'?(v<12e4?(v/1e3).toFixed(1)+' s':v<72e5?(v/6e4).toFixed(1)+' min':(v/36e5).toFixed(2)+' h'):f.dataset.xn+' '+Math.round(v).toLocaleString('en');
const tip=document.createElement('div'),bar=document.createElement('div');tip.className='tip';bar.className='cross';p.append(bar,tip);
p.onmousemove=e=>{const r=p.getBoundingClientRect(),at=Math.min(1,Math.max(0,(e.clientX-r.left)/r.width)),x=at*2000;
const near=lines.map(l=>l.p.reduce((b,q)=>Math.abs(q[0]-x)<Math.abs(b[0]-x)?q:b)),at0=xs(X(near[0][0]/2000));
tip.textContent=[at0,...lines.map((l,i)=>{const b=near[i],here=xs(X(b[0]/2000));return(l.n?l.n+' ':'')+show(Y(1-b[1]/10000))+(here===at0?'':' at '+here)})].join(' · ');
tip.style.display=bar.style.display='block';bar.style.left=at*100+'%';tip.style[at>.5?'right':'left']=(at>.5?1-at:at)*100+'%';tip.style[at>.5?'left':'right']='auto'};
p.onmouseleave=()=>{tip.style.display=bar.style.display='none'};});
